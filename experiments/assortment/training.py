"""Training: episodes of experience, updates after each, a validation now and then, checkpoints to go on from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import knapgrad as kg
from experiments import checkpoint
from experiments.assortment.agents import AGENTS, Agent, Batch, Settings, Structured, masked
from experiments.assortment.environment import FEATURES, ITEMS, STEPS, Stores
from experiments.assortment.networks import Actor
from experiments.assortment.policies import play
from experiments.sweep import Row

VALIDATION_SEED, TEST_SEED = 1_000_001, 2_000_001


class Memory:
    """The transitions of the last episodes, (replicas, transitions, ...)."""

    def __init__(self, replicas: int, episodes: int) -> None:
        shape = (replicas, episodes * STEPS)
        self.episodes = 0  # so far
        self.stored = Batch(
            torch.zeros(*shape, ITEMS, len(FEATURES)),
            torch.zeros(*shape, ITEMS),
            torch.zeros(*shape, ITEMS),
            torch.zeros(shape),
            torch.zeros(shape),
        )

    def next_episode(self) -> Batch:
        """Where to write the next one, (replicas, STEPS, ...), in place of the oldest."""
        begin = self.episodes * STEPS % self.stored.revenue.shape[1]
        self.episodes += 1
        return Batch(*(x[:, begin : begin + STEPS] for x in self.stored))

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        """As many transitions for each replica, of all that are kept."""
        replicas, filled = self.stored.revenue.shape
        filled = min(filled, self.episodes * STEPS)
        at = torch.arange(replicas)[:, None], torch.randint(filled, (replicas, size), generator=generator)
        return Batch(*(x[at] for x in self.stored))


@torch.no_grad()
def experience(agent: Agent, stores: Stores, discount: float, into: Batch) -> None:
    """One episode, written into (replicas, STEPS, ...) of a memory."""
    observation, _ = stores.reset()
    for t in range(STEPS):
        seen = torch.from_numpy(observation)
        display, action, mean = (x.squeeze(1) for x in agent.act(seen[:, None], stores.constraint))
        observation, revenue, *_ = stores.step(display.numpy())
        for stored, new in zip(into[:4], (seen, action, mean, torch.from_numpy(revenue))):
            stored[:, t] = new
    future = torch.zeros_like(into.revenue[:, 0])
    for t in reversed(range(STEPS)):
        into.future[:, t] = future
        future = discount * (into.revenue[:, t] + future)


@torch.no_grad()
def act_best(actor: Actor, stores: Stores) -> np.ndarray:
    """The policy that is judged: the best assortment by one actor's scores."""
    observation = torch.from_numpy(stores.observation)
    return kg.solve(masked(actor(observation[None])[0], observation), stores.constraint).numpy()


def revenues(agent: Agent, replicas: int, episodes: int, seed: int) -> np.ndarray:
    """(replicas, episodes): every replica in the same episodes."""
    policies = [partial(act_best, agent.actor.alone(replica)) for replica in range(replicas)]
    return np.stack([play(policy, Stores(episodes), seed) for policy in policies])


def gradient_covariance(
    agent: Structured, batch: Batch, constraint: kg.Knapsack, repeats: int, generator: torch.Generator
) -> list[float]:
    """Its trace for each replica: of the actor's gradient on one batch, estimated again and again."""
    scores = agent.actor(batch.observation)
    fixed, parameters = masked(scores.detach(), batch.observation), list(agent.actor.parameters())
    found = []
    for _ in range(repeats):
        gradient = agent.estimate(fixed, batch.observation, constraint, generator) / scores.shape[1]
        by_weight = torch.autograd.grad(scores, parameters, gradient, retain_graph=True)
        found.append(torch.cat([x.flatten(1) for x in by_weight], 1))
    return torch.stack(found).var(0).sum(-1).tolist()


class Training:
    """One agent in several replicas, with all that a checkpoint needs."""

    def __init__(self, agent: str, replicas: int, seed: int, settings: Settings) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.agent = AGENTS[agent](replicas, settings, self.generator)
        self.memory, self.stores = Memory(replicas, self.agent.memory), Stores(replicas)
        self.stores.reset(seed=seed)
        self.settings, self.replicas = settings, replicas
        self.episode, self.seconds = 0, 0.0
        self.curve: list[Row] = []

    def run_episode(self) -> None:
        start = time.perf_counter()
        settings, agent = self.settings, self.agent
        agent.progress = self.episode / max(settings.episodes - 1, 1)
        experience(agent, self.stores, settings.discount, self.memory.next_episode())
        for _ in range(agent.updates):
            agent.update(self.memory.draw(settings.batch, self.generator), self.stores.constraint)
        self.episode += 1
        self.seconds += time.perf_counter() - start

    def validate(self, episodes: int, repeats: int = 16) -> None:
        found = revenues(self.agent, self.replicas, episodes, VALIDATION_SEED).mean(1)
        row: Row = {"episode": self.episode, "revenue": found.round(4).tolist()}
        if isinstance(self.agent, Structured):
            generator = torch.Generator().manual_seed(self.episode)  # another: training goes on as without validation
            batch = self.memory.draw(self.settings.batch, generator)
            row["covariance"] = gradient_covariance(self.agent, batch, self.stores.constraint, repeats, generator)
        self.curve.append(row)

    def save(self, path: Path) -> None:
        state = {
            "settings": json.dumps(asdict(self.settings)),
            "actor": self.agent.actor.state_dict(),
            "critic": self.agent.critic.state_dict(),
            "optimizer": self.agent.optimizer.state_dict(),
            "memory": self.memory.stored._asdict(),
            "generator": self.generator.get_state(),
            "customers": json.dumps(self.stores.np_random.bit_generator.state),
            "progress": json.dumps([self.episode, self.seconds, self.curve]),
        }
        checkpoint.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        if state["settings"] != json.dumps(asdict(self.settings)):
            raise SystemExit(f"{path} was made with other settings: remove it to begin anew, or use another --output")
        self.agent.actor.load_state_dict(state["actor"])
        self.agent.critic.load_state_dict(state["critic"])
        self.agent.optimizer.load_state_dict(state["optimizer"])
        for stored, new in zip(self.memory.stored, state["memory"].values()):
            stored.copy_(new)
        self.generator.set_state(state["generator"])
        self.stores.np_random.bit_generator.state = json.loads(state["customers"])
        self.episode, self.seconds, self.curve = json.loads(state["progress"])
        self.memory.episodes = self.episode


def train(
    agent: str,
    replicas: int,
    seed: int,
    settings: Settings,
    path: Path,
    validations: int,
    validation_episodes: int,
    test_episodes: int,
) -> Row:
    """A whole training, from its checkpoint if there is one, and the test of what it came to."""
    torch.set_num_threads(1)  # trainings share the cores
    training = Training(agent, replicas, seed, settings)
    if path.exists():
        training.load(path)
    every = max(settings.episodes // validations, 1)
    with tqdm(total=settings.episodes, initial=training.episode, desc=agent, unit="episode", mininterval=2) as bar:
        while training.episode < settings.episodes:
            training.run_episode()
            bar.update()
            if training.episode % every == 0 or training.episode == settings.episodes:
                training.validate(validation_episodes)
                training.save(path)
                bar.set_postfix(revenue=f"{np.mean(training.curve[-1]['revenue']):.1f}")
    found = revenues(training.agent, replicas, test_episodes, TEST_SEED)
    return {
        **summary(found),
        "curve": {name: [point[name] for point in training.curve] for name in training.curve[-1]},
        "training_seconds": round(training.seconds, 1),
    }


def judge(policy: Callable[[Stores], np.ndarray], test_episodes: int) -> Row:
    return summary(play(policy, Stores(test_episodes), TEST_SEED)[None])


def summary(found: np.ndarray) -> Row:
    """Of revenues (replicas, episodes): means, and standard errors of the means over episodes."""
    errors = found.std(1, ddof=1) / found.shape[1] ** 0.5
    return {"revenue": found.mean(1).round(4).tolist(), "standard_error": errors.round(4).tolist()}
