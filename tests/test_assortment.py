"""The assortment experiment: the environment, the exact expert, the agents, and trainings that are stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gymnasium")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # experiments and benchmarks are folders of the repository, not of the package

import gymnasium  # noqa: E402
import torch  # noqa: E402
from gymnasium.utils.env_checker import check_env  # noqa: E402

import knapgrad as kg  # noqa: E402
from experiments import sweep  # noqa: E402
from experiments.assortment import agents, environment, measure, policies, training  # noqa: E402
from experiments.assortment.environment import CAPACITY, FEATURES, STEPS, STOCK, Stores  # noqa: E402

TINY = agents.Settings(episodes=3, memory=2, ppo_memory=2, updates=2, ppo_updates=2)


# The environment.


@pytest.mark.filterwarnings("error")
def test_gymnasium_finds_nothing_wrong():
    check_env(gymnasium.make("knapgrad/Assortment-v0").unwrapped)
    assert gymnasium.make_vec("knapgrad/Assortment-v0", num_envs=3).unwrapped.num_envs == 3


def test_the_instance_has_as_many_assortments_as_the_papers():
    weights = Stores(1).weights
    assert len(weights) == 20 and set(weights) <= set(range(1, 6))
    assert environment.count_feasible(weights) == 989_034
    log_count = kg.value(np.zeros(20), kg.Knapsack(weights, CAPACITY), kg.Shannon())
    assert np.exp(log_count) == pytest.approx(989_034, rel=1e-9)


def test_one_store_is_a_row_of_many():
    one, many = environment.Store(), Stores(1)
    (single, _), (several, _) = one.reset(seed=3), many.reset(seed=3)
    np.testing.assert_array_equal(single, several[0])
    for _ in range(STEPS):
        display = policies.greedy(many)
        several, rewards, over, _, _ = many.step(display)
        single, reward, done, cut, _ = one.step(display[0])
        np.testing.assert_array_equal(single, several[0])
        assert (reward, done, cut) == (rewards[0], over[0], False)
    assert done


def test_a_seed_repeats_and_another_differs():
    first, again, other = (policies.play(policies.greedy, Stores(8), seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_features_evolve_as_the_paper_says():
    """Step by step, written out for one store, in the paper's words."""
    stores = Stores(1)
    stores.reset(seed=0)
    hype, satisfaction = stores.hype[0].copy(), stores.satisfaction[0].copy()
    first_hype, first_satisfaction = hype.copy(), satisfaction.copy()
    stock, history = np.full(20, STOCK), []
    for t in range(1, STEPS + 1):
        observation, reward, _, _, info = stores.step(policies.greedy(stores))
        bought, old_hype, old_satisfaction = int(info["bought"][0]), hype.copy(), satisfaction.copy()
        history.append(bought)
        growth = np.ones(20)
        for ago, item in enumerate(reversed(history[-5:]), start=1):
            if item >= 0:
                growth[item] += 0.02 if ago == 1 else -0.005
        hype = hype * growth
        if bought >= 0:
            satisfaction[bought] *= 1.01
            stock[bought] -= 1
            assert reward[0] == stores.prices[0, bought]
        else:
            assert reward[0] == 0
        seen = dict(zip(FEATURES, observation[0].T))
        expected = {
            "hype": hype / 10,
            "satisfaction": satisfaction / 10,
            "price": stores.prices[0] / 10,
            "time": np.full(20, (1 + 9 * t / STEPS) / 10),
            "hype change": (hype - old_hype) / 10,
            "satisfaction change": (satisfaction - old_satisfaction) / 10,
            "hype since the start": (hype - first_hype) / 10,
            "satisfaction since the start": (satisfaction - first_satisfaction) / 10,
            "stock": stock / STOCK,
            "weight": stores.weights / CAPACITY,
        }
        for name, values in expected.items():
            np.testing.assert_allclose(seen[name], values, atol=1e-6, err_msg=f"{name} after step {t}")
    assert len(set(history)) > 5 and (stock < STOCK).any()


def test_customers_choose_by_the_logit_model():
    stores = Stores(100_000)
    stores.reset(seed=0)
    for array in (stores.prices, stores.static_utility, stores.hype, stores.satisfaction):
        array[:] = array[0]  # the same store for all
    display = np.tile(policies.greedy(stores)[:1], (stores.num_envs, 1))
    display[:, np.argsort(stores.utility[0])[-3:]] = 0  # none that nearly all would take
    v = np.exp(stores.utility[0]) * display[0]
    bought = stores.step(display)[4]["bought"]
    chances = np.append(v, 1) / (1 + v.sum())
    counts = np.bincount(bought % 21, minlength=21)  # -1, nothing, is last
    deviation = np.abs(counts / stores.num_envs - chances)
    assert (deviation <= 5 * np.sqrt(chances * (1 - chances) / stores.num_envs)).all()
    assert chances[-1] > 1e-4


def test_what_does_not_fit_or_is_sold_out_is_not_displayed():
    stores = Stores(3)
    stores.reset(seed=0)
    stores.stock[1, 4] = 0
    display = np.zeros((3, 20))
    display[0], display[1, 4], display[2, 4] = 1, 1, 1
    _, reward, _, _, info = stores.step(display)
    assert info["feasible"].tolist() == [False, False, True]
    assert info["bought"][0] == info["bought"][1] == -1 and reward[0] == reward[1] == 0 and stores.stock.min() == 0


def test_bad_actions_are_refused():
    stores = Stores(2)
    stores.reset(seed=0)
    with pytest.raises(ValueError, match=r"an action is \(2, 20\)"):
        stores.step(np.zeros(20))
    for bad in (0.5, np.nan):
        with pytest.raises(ValueError, match="zeros and ones"):
            stores.step(np.full((2, 20), bad))
    for _ in range(STEPS):
        stores.step(np.zeros((2, 20)))
    with pytest.raises(RuntimeError, match="call reset"):
        stores.step(np.zeros((2, 20)))


# Policies.


def assortments(items: int) -> np.ndarray:
    return np.array(list(product((0.0, 1.0), repeat=items)))


def expected_revenues(stores: Stores, episode: int, displays: np.ndarray) -> np.ndarray:
    """-inf for what cannot be displayed."""
    v = np.exp(stores.utility[episode])
    revenue = displays @ (v * stores.prices[episode]) / (1 + displays @ v)
    possible = (displays @ stores.weights <= stores.capacity) & ~(displays * stores.sold_out[episode]).any(-1)
    return np.where(possible, revenue, -np.inf)


@pytest.mark.parametrize("capacity", [2, 3, 9, 17])
def test_the_expert_is_the_enumeration_of_few_items(capacity):
    rng = np.random.default_rng(capacity)
    stores = Stores(200, rng.integers(1, 6, 8), capacity)
    stores.reset(seed=capacity)
    stores.stock = rng.integers(0, 2, stores.stock.shape)
    display, revenue = policies.highest_revenue(stores.utility, stores)
    everything = assortments(8)
    for episode in range(200):
        found = expected_revenues(stores, episode, everything)
        assert revenue[episode] == pytest.approx(found.max(), rel=1e-12)
        assert expected_revenues(stores, episode, display[episode]) == pytest.approx(found.max(), rel=1e-12)


def test_the_expert_is_the_enumeration_of_the_whole_store():
    """Of 2^20 assortments in turn: the revenue of each half is a table of 2^10."""
    stores = Stores(3)
    stores.reset(seed=5)
    half = assortments(10)
    for t in range(3):
        for _ in range(26 * (t > 0)):
            stores.step(policies.expert(stores))
        _, revenue = policies.highest_revenue(stores.utility, stores)
        for episode in range(3):
            v = np.where(stores.sold_out[episode], 0.0, np.exp(stores.utility[episode]))
            pairs = [
                [half @ (x[:10]) for x in (stores.weights, v, v * stores.prices[episode])],
                [half @ (x[10:]) for x in (stores.weights, v, v * stores.prices[episode])],
            ]
            load, attraction, worth = (a[:, None] + b for a, b in zip(*pairs))
            best = np.where(load <= CAPACITY, worth / (1 + attraction), 0.0).max()
            assert revenue[episode] == pytest.approx(best, rel=1e-12)
    assert stores.sold_out.any()


def test_sold_out_by_score_is_sold_out_by_weight():
    stores = Stores(50)
    stores.reset(seed=0)
    stores.stock = np.random.default_rng(0).integers(0, 2, stores.stock.shape)
    weights = np.where(stores.sold_out, CAPACITY + 1, stores.weights)
    by_weight = kg.solve(stores.prices, kg.Knapsack(weights, CAPACITY))
    np.testing.assert_array_equal(policies.greedy(stores), by_weight)
    assert not (by_weight * stores.sold_out).any()


def test_policies_rank_as_they_must():
    found = {name: policies.play(policy, Stores(2_000), 0).mean() for name, policy in policies.POLICIES.items()}
    assert found["expert"] > found["greedy"] + 15 and found["expert"] > found["random"] + 15


# Agents.


@pytest.mark.parametrize("name", agents.EXPLORERS)
def test_exploration_keeps_to_the_constraint_and_its_mean_is_that_of_the_candidates(name):
    stores, generator = Stores(2), torch.Generator().manual_seed(0)
    scores = torch.randn(2, 20, generator=generator)
    scores[0, 3] = -torch.inf
    candidates, mean = agents.EXPLORERS[name].explore(scores, stores.constraint, 2.0, 4_000, generator)
    assert candidates.shape == (4_000, 2, 20) and mean.shape == (2, 20)
    assert (candidates.double() @ torch.from_numpy(stores.weights).double() <= CAPACITY).all()
    assert (candidates[:, 0, 3] == 0).all() and mean[0, 3] == 0
    assert (candidates.mean(0) - mean).abs().max() < 5 * (0.25 / 4_000) ** 0.5 * (
        2 if name == "SRL perturbed" else 1
    ) ** 0.5


def test_the_target_is_the_softmax_of_the_values():
    candidates = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    target = agents.mix(candidates, torch.tensor([[np.log(3.0)], [0.0]]))
    torch.testing.assert_close(target, torch.tensor([[0.75, 0.25]]), check_dtype=False)


def test_replicas_are_trained_as_if_alone():
    """The gradient of all in one call is that of each by itself."""
    generator = torch.Generator().manual_seed(0)
    actor = agents.Actor(3, generator)
    observation = torch.rand(3, 5, 20, 12, generator=generator)
    actor(observation).square().sum().backward()
    for replica in range(3):
        alone = actor.alone(replica)
        alone(observation[replica : replica + 1]).square().sum().backward()
        for together, single in zip(actor.parameters(), alone.parameters()):
            torch.testing.assert_close(together.grad[replica], single.grad[0])


def test_ppo_moves_towards_what_paid():
    settings = agents.Settings(learning_rate=1e-2)
    agent = agents.PPO(1, settings, torch.Generator().manual_seed(0))
    observation = torch.rand(1, 32, 20, 12, generator=agent.generator)
    with torch.no_grad():
        mean = agent.actor(observation)
        action = mean + agent.noise(mean.shape)
        paid = 10 * (action - mean)[..., 0]  # for a higher score of the first item
    zero = torch.zeros(1, 32)
    batch = agents.Batch(observation, action, mean, paid, zero)
    for _ in range(20):
        agent.update(batch, Stores(1).constraint)
    with torch.no_grad():
        moved = agent.actor(observation) - mean
        assert (moved * (action - mean) * paid.sign()[..., None]).sum() > 0


@pytest.mark.parametrize("name", agents.AGENTS)
def test_a_training_that_is_stopped_goes_on_as_if_it_were_not(name, tmp_path):
    whole = training.Training(name, 2, 0, TINY)
    for _ in range(3):
        whole.run_episode()
    stopped = training.Training(name, 2, 0, TINY)
    for _ in range(2):
        stopped.run_episode()
    stopped.save(tmp_path / "checkpoint.pt")
    other = training.Training(name, 2, 99, TINY)
    other.load(tmp_path / "checkpoint.pt")
    other.run_episode()
    for expected, found in zip(whole.agent.parameters, other.agent.parameters):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert other.episode == 3 and all(torch.isfinite(x).all() for x in other.agent.parameters)


def test_memory_holds_what_happened():
    run = training.Training("SRL Gini", 2, 0, TINY)
    run.run_episode()
    stored = training.Batch(*(x[:, :STEPS] for x in run.memory.stored))
    assert (stored.observation[:, :, 0, 5] * 10).tolist()[0] == pytest.approx([1 + 9 * t / STEPS for t in range(STEPS)])
    future = torch.zeros(2)
    for t in reversed(range(STEPS)):
        torch.testing.assert_close(stored.future[:, t], future)
        future = TINY.discount * (stored.revenue[:, t] + future)
    price, gone = stored.observation[..., FEATURES.index("price")] * 10, stored.observation[..., 10] == 0
    paid = stored.revenue[..., None]
    assert ((paid == 0) | (((price - paid).abs() < 1e-3) & (stored.action == 1)).any(-1, keepdim=True)).all()
    assert not (stored.action.bool() & gone).any()


def test_exact_gradients_vary_less_than_perturbed_ones(torch_threads):
    found = {}
    for name in agents.EXPLORERS:
        run = training.Training(name, 2, 0, TINY)
        run.run_episode()
        batch = run.memory.draw(0, 32, run.generator)
        found[name] = np.mean(training.gradient_covariance(run.agent, batch, run.stores.constraint, 64))
    assert max(found[name] for name in found if name != "SRL perturbed") < found["SRL perturbed"]


# The whole.


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments.assortment", *arguments]


def test_a_quick_run_writes_rows_times_and_a_figure(tmp_path):
    done = subprocess.run(
        command("--quick", "--replicas", "2", "--output", str(tmp_path)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["agent"]: row for row in sweep.read(tmp_path / "assortment.jsonl")}
    assert set(rows) == {*agents.AGENTS, *policies.POLICIES}
    assert all(len(rows[name]["revenue"]) == 2 and rows[name]["episodes"] == 4 for name in agents.AGENTS)
    assert rows["greedy"]["feasible_assortments"] == 989_034
    times = json.loads((tmp_path / "assortment_time.json").read_text())["rows"]
    assert len(times) == 3 * len(agents.EXPLORERS) and measure.BASELINE in agents.EXPLORERS
    assert (tmp_path / "assortment.png").stat().st_size > 10_000
    assert "SRL Tsallis" in done.stdout and "expert" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "no such part: trian"),
        (["--agents", "DQN"], "no such agent: DQN"),
        (["--replicas", "0"], "at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and message in done.stderr
