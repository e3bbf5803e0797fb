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
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # experiments and measuring are folders of the repository, not of the package

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
    with pytest.raises(RuntimeError, match="call reset"):
        Stores(2).step(np.zeros((2, 20)))


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


@pytest.mark.parametrize("name", ["random", "expert"])
def test_policies_meet_the_same_customers(name):
    first, second = Stores(4), Stores(4)
    policies.play(policies.greedy, first, 7)
    policies.play(policies.POLICIES[name], second, 7)
    np.testing.assert_array_equal(first.prices, second.prices)
    assert first.np_random.bit_generator.state == second.np_random.bit_generator.state


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


@pytest.mark.parametrize("network", [agents.Actor, agents.Critic])
def test_what_a_replica_sees_is_its_own(network):
    generator = torch.Generator().manual_seed(0)
    model, observation = network(2, generator), torch.rand(2, 3, 20, 12, generator=generator)
    more = () if network is agents.Actor else (torch.ones(2, 3, 4, 20),)
    changed = observation.clone()
    changed[1] += 1
    first, second = model(observation, *more), model(changed, *more)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


def agent_of(name: str, **changes: float) -> agents.Agent:
    return agents.AGENTS[name](2, agents.Settings(**changes), torch.Generator().manual_seed(0))


def batch_of(agent: agents.Agent, size: int = 8) -> agents.Batch:
    """Observations with some items sold out, and actions that fit the kind of agent."""
    observation = torch.rand(2, size, 20, 12, generator=agent.generator)
    observation[..., FEATURES.index("stock")] = (observation[..., 0] > 0.1).float()
    with torch.no_grad():
        _, action, mean = agent.act(observation, Stores(1).constraint)
    paid = 10 * torch.rand(2, size, generator=agent.generator)
    return agents.Batch(observation, action, mean, paid, 50 * paid)


def test_what_is_annealed_goes_from_end_to_end():
    agent = agent_of("SRL Gini")
    found = []
    for agent.progress in (0.0, 0.5, 1.0):
        settings = agent.settings
        found.append([agent.annealed(x) for x in (settings.strength, settings.temperature, settings.ppo_noise)])
    assert found == [[5.0, 1.0, 2.0], [3.0, 0.75, 1.5], [1.0, 0.5, 1.0]]
    run = training.Training("SRL Gini", 2, 0, TINY)
    seen = []
    for _ in range(3):
        run.run_episode()
        seen.append(run.agent.progress)
    assert seen == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("name", ["SRL Shannon", "SRL Gini", "SRL Tsallis"])
def test_an_update_follows_the_fenchel_young_loss(name):
    """The actor's gradient is that of the mean loss against the target, by autograd; the target is made again here."""
    agent = agent_of(name)
    batch, constraint = batch_of(agent), Stores(1).constraint
    regularizer = agent.explorer.regularizer(5.0)
    state = agent.generator.get_state()
    with torch.no_grad():
        scores = agents.masked(agent.actor(batch.observation), batch.observation)
        drawn = kg.torch.SubsetDistribution(scores, constraint, regularizer).sample((32,), agent.generator)
        q = torch.stack([agent.critic(batch.observation, y[:, :, None]).sum(-1).squeeze(-1) for y in drawn])
        target = (torch.softmax(q, 0)[..., None] * drawn).sum(0)
    agent.actor.zero_grad()
    scores = agents.masked(agent.actor(batch.observation), batch.observation)
    kg.fenchel_young_loss(scores, target, constraint, regularizer).mean(-1).sum().backward()
    expected = [parameter.grad.clone() for parameter in agent.actor.parameters()]
    agent.generator.set_state(state)
    agent.update(batch, constraint)
    for parameter, gradient in zip(agent.actor.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", agents.EXPLORERS)
def test_updates_raise_the_scores_of_what_the_critic_likes(name, monkeypatch):
    agent = agent_of(name, learning_rate=1e-2)
    batch, constraint = batch_of(agent), Stores(1).constraint
    likes = torch.zeros(20)
    likes[3], likes[8] = 10.0, -10.0
    monkeypatch.setattr(
        agents.Critic,
        "forward",
        lambda critic, observation, displays: (displays @ likes)[..., None] + 0 * critic.head.bias[0, 0, 0],
    )
    batch = batch._replace(observation=batch.observation.index_fill(-1, torch.tensor([10]), 1.0))
    batch.observation[..., 0] = torch.linspace(0, 1, 20)  # tells the items apart
    with torch.no_grad():
        before = agent.actor(batch.observation)
    for _ in range(30):
        agent.update(batch, constraint)
    with torch.no_grad():
        gain = (agent.actor(batch.observation) - before).mean((0, 1))
    assert gain[3] > gain[8]


@pytest.mark.parametrize("name", agents.AGENTS)
def test_the_critic_learns_what_displays_bring(name):
    """The gradient of its loss is that of the squared error at what was displayed, or for PPO at the whole stock."""
    agent = agent_of(name)
    batch = batch_of(agent)
    shown = batch.action if name != "PPO" else (batch.observation[..., FEATURES.index("stock")] > 0).float()
    revenue, future = agent.critic(batch.observation, shown[:, :, None]).squeeze(2).unbind(-1)
    loss = (revenue - batch.revenue).square() / 10 + (future - batch.future).square() / 1000
    expected = torch.autograd.grad(loss.mean(1).sum(), list(agent.critic.parameters()))
    agent.update(batch, Stores(1).constraint)
    for parameter, gradient in zip(agent.critic.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_ppo_follows_the_clipped_surrogate():
    """Written with torch's own Gaussian, after a few steps, so that some ratios are clipped."""
    agent = agent_of("PPO", learning_rate=3e-3)
    batch, constraint = batch_of(agent, 64), Stores(1).constraint
    for _ in range(4):
        agent.update(batch, constraint)
    normal = torch.distributions.Normal
    scores = agent.actor(batch.observation)
    new, old = (normal(mean, 2.0).log_prob(batch.action).sum(-1) for mean in (scores, batch.mean))
    ratio = (new - old).exp()
    value = agent.critic(batch.observation, (~agents.sold_out(batch.observation)).float()[:, :, None])
    advantage = batch.revenue + batch.future - value.sum(-1).squeeze(-1).detach()
    advantage = (advantage - advantage.mean(1, keepdim=True)) / (advantage.std(1, keepdim=True) + 1e-6)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    assert ((ratio < 0.8) | (ratio > 1.2)).any() and ((ratio > 0.8) & (ratio < 1.2)).any()
    expected = torch.autograd.grad(-gain.mean(1).sum(), list(agent.actor.parameters()))
    agent.update(batch, constraint)
    for parameter, gradient in zip(agent.actor.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_memory_gives_each_replica_its_own_and_nothing_that_is_not_there():
    memory, generator = training.Memory(3, 2), torch.Generator().manual_seed(0)
    for episode in range(5):
        for x in memory.next_episode():
            x[:] = (100 * torch.arange(3.0) + 1 + episode).view(3, *[1] * (x.dim() - 1))
        batch = memory.draw(500, generator)
        kept = {1 + e for e in range(max(0, episode - 1), episode + 1)}
        for replica in range(3):
            assert {int(x) - 100 * replica for x in batch.revenue[replica]} == kept
        assert (batch.observation[:, :, 0, 0] == batch.revenue).all()


@pytest.mark.parametrize("name", agents.AGENTS)
def test_a_training_that_is_stopped_goes_on_as_if_it_were_not(name, tmp_path):
    whole = training.Training(name, 2, 0, TINY)
    for _ in range(3):
        whole.run_episode()
    stopped = training.Training(name, 2, 0, TINY)
    for _ in range(2):
        stopped.run_episode()
    stopped.validate(2, repeats=2)  # changes nothing
    stopped.save(tmp_path / "checkpoint.pt")
    other = training.Training(name, 2, 99, TINY)
    other.load(tmp_path / "checkpoint.pt")
    assert other.curve == stopped.curve and other.curve[0]["episode"] == 2
    other.run_episode()
    for expected, found in zip(whole.agent.parameters, other.agent.parameters):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert other.episode == 3 and all(torch.isfinite(x).all() for x in other.agent.parameters)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    training.Training("PPO", 2, 0, TINY).save(tmp_path / "checkpoint.pt")
    other = training.Training("PPO", 2, 0, agents.Settings(episodes=4, memory=2, ppo_memory=2))
    with pytest.raises(SystemExit, match="other settings: remove it"):
        other.load(tmp_path / "checkpoint.pt")


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
        batch = run.memory.draw(32, run.generator)
        covariance = training.gradient_covariance(run.agent, batch, run.stores.constraint, 64, run.generator)
        found[name] = np.mean(covariance)
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
    assert not list((tmp_path / "checkpoints").iterdir())
    times = json.loads((tmp_path / "assortment_time.json").read_text())
    assert len(times["rows"]) == 3 * len(agents.EXPLORERS) and measure.BASELINE in agents.EXPLORERS
    assert set(times["transitions_a_second"]) == set(policies.POLICIES)
    for part in ("learning", "revenue", "covariance", "time"):
        assert (tmp_path / f"assortment_{part}.png").stat().st_size > 10_000
    assert "SRL Tsallis" in done.stdout and "expert" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "no such part: trian"),
        (["--agents", "DQN"], "no such agent: DQN"),
        (["--replicas", "0"], "at least 1"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    from experiments.assortment.__main__ import main

    monkeypatch.setattr(sys, "argv", ["assortment", *arguments, "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert message in capsys.readouterr().err + str(stopped.value.code)
