"""The paper's experiments; see README.md in this folder."""
