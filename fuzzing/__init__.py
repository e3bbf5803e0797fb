"""Random instances of every constraint, checked against an oracle of their own: ``python -m fuzzing --help``."""
