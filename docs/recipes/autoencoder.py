# %% [markdown]
# # A discrete autoencoder
#
# **Which parts is an image made of, without labels?** An image is the average of three handwritten digits. The encoder scores ten slots, a layer selects three of them, and the image is drawn
# as the average of what these slots show. If it works, the slots become digits, without any label.
#
# The model and the data are those of [examples/top_k_autoencoder.py](../../examples/top_k_autoencoder.py); run this notebook in the folder `examples`.

# %%
import matplotlib.pyplot as plt
import torch
from top_k_autoencoder import Autoencoder, recovered, stack

import knapgrad as kg

torch.manual_seed(0)
torch.set_num_threads(1)
three, smooth = kg.TopK(3), kg.Gini(0.5)
train, _ = stack(4000, slice(1200))
test, digits = stack(1000, slice(1200, None))  # digits are for the evaluation only

# %% [markdown]
# ## Training
#
# The layer is `kg.torch.Relax(kg.TopK(3), kg.Gini(0.5))`. At first, `kg.divergence` keeps the scores near a uniform prior, so that all slots are used; its weight falls to zero in the first half.
# Without it many trainings end with the same three slots for every image: try `fit(prior=0.0)`.


# %%
def fit(prior, steps=2500):
    torch.manual_seed(0)
    model = Autoencoder(kg.torch.Relax(three, smooth))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    shares = []
    for step in range(steps):
        images = train[torch.randint(len(train), (128,))]
        drawn, theta, _ = model(images)
        loss = (drawn - images).square().sum(-1)
        loss = loss + prior * max(0.0, 1 - 2 * step / steps) * kg.divergence(theta, three, smooth)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        if step % 100 == 0:
            with torch.no_grad():
                shares.append(recovered(model(test)[1], digits)[0])
    return model, shares


model, shares = fit(prior=1.0)
with torch.no_grad():
    drawn, theta, y = model(test)
share, slots = recovered(theta, digits)
print(f"{share:.0%} of the digits recovered (30% by chance)")
print(
    f"slots above zero, on average: {(y > 0).sum(-1).float().mean():.1f}; their shares add up to {y.sum(-1).mean():.1f}"
)

# %%
figure, panels = plt.subplots(1, 10, figsize=(7.4, 1.2))
for digit, axis in enumerate(panels):
    axis.imshow(model.shown[slots[digit]].detach().sigmoid().view(8, 8), cmap="gray_r")
    axis.set(title=digit, xticks=[], yticks=[])
    axis.grid(visible=False)
figure.suptitle("what the slot of each digit shows")

# %%
plt.plot(range(0, 2500, 100), [100 * x for x in shares])
plt.axhline(30, ls="--", lw=1, color="#7a8290")
plt.xlabel("step")
plt.ylabel("digits recovered, %")

# %% [markdown]
# ## For your own problem
#
# - `kg.TopK(3, at_least=0)` allows fewer parts, a `Knapsack` parts of different cost, and `MultipleChoice` one part of each kind.
# - `kg.torch.Sample` in place of `Relax` gives discrete codes in training, with the gradient of their mean.
# - Results vary from seed to seed: 51 to 56% with seeds 0 to 4 and 4000 steps ([experiments](../experiments.md)). Watch whether all slots are used; if not, a stronger or longer prior helps.
