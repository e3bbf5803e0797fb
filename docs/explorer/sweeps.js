// The sweeps of src/knapgrad/reference.py for one instance. Tags such as [V] name the equations in docs/math.md.
//
// A problem is {choices, capacity, slack}. choices[k] lists the options of choice k, each {score, weight, item}; scores
// are already divided by gamma. An item is a choice between two options: to skip it (score 0, weight 0), and to pick it.
// Option {item: null} stands for picking nothing.

const INFEASIBLE = -1e300; // finite, so that differences of infeasible values are numbers
const FEASIBLE = 0.5 * INFEASIBLE; // a value below it has an infeasible state in it

// With delta = pick - skip: value is what the smoothed maximum adds to the larger branch, prob the probability to pick.
export const regularizers = {
  shannon: {
    value: (delta) => Math.log1p(Math.exp(-Math.abs(delta))),
    prob: (delta) => {
      const small = Math.exp(-Math.abs(delta));
      return (delta > 0 ? 1 : small) / (1 + small);
    },
  },
  gini: {
    value: (delta) => Math.max(0.5 * (1 - Math.abs(delta)), 0) ** 2,
    prob: (delta) => Math.min(Math.max(0.5 * (1 + delta), 0), 1),
  },
  tsallis: {
    value: (delta) => {
      const s = 0.5 * Math.abs(delta);
      return s < 1 ? 4 / 3 - s - (2 - s * s) ** 1.5 / 3 : 0;
    },
    prob: (delta) => {
      const s = Math.min(0.5 * Math.abs(delta), 1);
      const smaller = (0.5 * (Math.sqrt(2 - s * s) - s)) ** 2;
      return delta > 0 ? 1 - smaller : smaller;
    },
  },
  hard: { value: () => 0, prob: (delta) => (delta > 0 ? 1 : 0) },
};

/** What a constraint asks, as a problem. items: [{score, weight, group}]; constraint: "knapsack", "topk" or "groups". */
export function problemOf({ constraint, items, capacity, atLeast = 0, optional = false }, gamma = 1) {
  const option = (item, weight) => ({ score: items[item].score / gamma, weight, item });
  const nothing = { score: 0, weight: 0, item: null };
  let choices = items.map((item, i) => [nothing, option(i, constraint === "topk" ? 1 : item.weight)]);
  if (constraint === "groups") {
    const names = [...new Set(items.map((item) => item.group))].sort((a, b) => a - b);
    const members = names.map((name) => items.flatMap((item, i) => (item.group === name ? [i] : [])));
    const most = Math.max(...members.map((group) => group.length));
    const missing = { score: -Infinity, weight: 0, item: null, missing: true }; // groups are padded to one length
    choices = members.map((group) => [
      ...(optional ? [nothing] : []),
      ...group.map((i) => option(i, items[i].weight)),
      ...Array(most - group.length).fill(missing),
    ]);
  }
  return { choices, capacity, slack: capacity - atLeast };
}

/** The comparisons [low, middle, high] of a balanced tree: options low..middle-1 against middle..high-1. */
export function tournament(low, high) {
  if (high - low < 2) return [];
  const middle = low + Math.floor((high - low) / 2);
  return [...tournament(low, middle), ...tournament(middle, high), [low, middle, high]];
}

/** V[k][c], the smoothed optimum of the first k choices at capacity c, and P[k][o][c], the probability of option o. */
export function tables({ choices, capacity, slack }, regularizer) {
  const { value, prob } = regularizers[regularizer];
  const columns = [...Array(capacity + 1).keys()];
  const V = [columns.map((c) => (c <= slack ? 0 : INFEASIBLE))];
  const P = choices.map((options, k) => {
    const nodes = options.map(({ score, weight }) =>
      columns.map((c) => (c >= weight ? V[k][c - weight] : INFEASIBLE) + Math.max(score, INFEASIBLE)),
    );
    const shares = options.map(() => columns.map(() => 1));
    for (const [low, middle, high] of tournament(0, options.length)) {
      for (const c of columns) {
        const [skip, pick] = [nodes[low][c], nodes[middle][c]];
        const delta = pick - skip;
        const q = prob(delta); // [Q]
        nodes[low][c] = (delta > 0 ? pick : skip) + value(delta); // [V]
        for (let o = low; o < high; o++) shares[o][c] *= o < middle ? 1 - q : q; // [P]
      }
    }
    V.push(nodes[0].map((x) => Math.max(x, INFEASIBLE)));
    return shares;
  });
  return { V, P, value: V.at(-1)[capacity], feasible: V.at(-1)[capacity] > FEASIBLE };
}

/** The relaxed selection y[k][o], and the entropy of the distribution over selections. */
export function collect({ choices, capacity }, P) {
  let E = Array(capacity + 1).fill(0);
  let entropy = 0;
  E[capacity] = 1;
  const y = choices.map((options) => options.map(() => 0));
  for (let k = choices.length - 1; k >= 0; k--) {
    const before = Array(capacity + 1).fill(0);
    choices[k].forEach(({ weight }, o) => {
      for (let c = 0; c <= capacity; c++) {
        const p = P[k][o][c];
        if (!E[c] || !p) continue;
        y[k][o] += E[c] * p; // [y]
        entropy -= E[c] * p * Math.log(p);
        if (c >= weight) before[c - weight] += E[c] * p; // [E]
      }
    });
    E = before;
  }
  return { y, entropy };
}

/** The smoothed optimum at every capacity 0..reach, null where nothing is feasible. mode: "most", "exactly" or "band". */
export function frontier({ choices }, reach, atLeast, mode, regularizer) {
  const last = (capacity, slack) => tables({ choices, capacity, slack }, regularizer).V.at(-1);
  let row;
  if (mode === "band") row = [...Array(reach + 1).keys()].map((c) => (c < atLeast ? INFEASIBLE : last(c, c - atLeast)[c]));
  else row = last(reach, mode === "exactly" ? 0 : reach);
  return row.map((value) => (value > FEASIBLE ? value : null));
}

/** A path [{k, o, c}], from the last choice to the first: option o of choice k, with c of the capacity left. */
export function sample({ choices, capacity }, P, random = Math.random) {
  const path = [];
  let c = capacity;
  for (let k = choices.length - 1; k >= 0; k--) {
    const u = random();
    let o = choices[k].length;
    for (let reached = 0; o > 0 && !(u < reached); ) reached += P[k][--o][c]; // [sample]
    if (!P[k][o][c]) o = P[k].findIndex((row) => row[c] > 0);
    path.push({ k, o, c });
    c -= choices[k][o].weight;
  }
  return path;
}

/** The best selection as a path; of ties, the one that skips the later item. */
export const solve = (problem) => sample(problem, tables(problem, "hard").P, () => 0.5);

/** The most probable selections, at most `count`: [{probability, picks}] with picks[k] the option of choice k. */
export function likeliest({ choices, capacity }, P, count) {
  let best = Array.from({ length: capacity + 1 }, () => [{ probability: 1, picks: [] }]);
  choices.forEach((options, k) => {
    best = best.map((_, c) =>
      options
        .flatMap(({ weight }, o) =>
          P[k][o][c] && c >= weight
            ? best[c - weight].map((part) => ({ probability: part.probability * P[k][o][c], picks: [...part.picks, o] }))
            : [],
        )
        .sort((a, b) => b.probability - a.probability)
        .slice(0, count),
    );
  });
  return best[capacity];
}

/** How many selections are feasible, and how many of them have a probability above 0. */
export function counts({ choices, capacity, slack }, P) {
  const count = (allowed) =>
    choices.reduce(
      (ways, options, k) =>
        ways.map((_, c) =>
          options.reduce((sum, { weight }, o) => sum + (c >= weight && allowed(k, o, c) ? ways[c - weight] : 0), 0),
        ),
      Array.from({ length: capacity + 1 }, (_, c) => (c <= slack ? 1 : 0)),
    )[capacity];
  return { subsets: count((k, o) => !choices[k][o].missing), possible: count((k, o, c) => P[k][o][c] > 0) };
}
