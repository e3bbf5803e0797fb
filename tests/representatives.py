"""For each file of the package tests that run it: what ``make check`` runs, in half a minute."""

from __future__ import annotations

#: how the names of tests begin -> the files of src/knapgrad that they stand for
REPRESENTATIVES: dict[str, str] = {
    "operations/test_operations.py::test_operations_are_the_enumeration[numpy-gini-knapsack-": """
        __init__ arguments backends lattice ops regularizers values constraints/__init__ constraints/base
        constraints/knapsack constraints/weighted numpy/__init__ numpy/backend kernels/__init__ kernels/numba/__init__
        kernels/numba/bands kernels/numba/groups kernels/numba/kernels kernels/numba/layout kernels/operations forks
        constraints/limited kernels/numba/entries kernels/numba/frames kernels/numba/launch kernels/numba/steps
        kernels/numba/private kernels/numba/rows kernels/numba/sweeps kernels/numba/threads kernels/numba/variants
        kernels/numba/vector""",
    "operations/test_operations.py::test_operations_are_the_enumeration[numpy-tsallis-": """
        constraints/top_k""",
    "operations/test_operations.py::test_operations_are_the_enumeration[numpy-shannon-choices": """
        constraints/multiple_choice kernels/numba/choices""",
    "operations/test_operations.py::test_operations_are_the_enumeration[numpy-gini-budgets-": """
        constraints/multi_knapsack kernels/numba/boxes""",
    "operations/test_operations.py::test_sample_frequencies[numpy-tsallis-": """
        kernels/numba/paths""",
    "for_torch/test_torch_autograd.py::test_the_third_cumulants_of_many_items[7-7]": "torch/second_order",
    "kernels/test_quadrature.py::test_k_and_gamma_of_each_instance[": "kernels/numba/laws kernels/numba/quadrature",
    "operations/test_operations.py::test_operations_are_the_enumeration[jax-shannon-": """
        jax/backend jax/operators""",
    "operations/test_operations.py::test_operations_are_the_enumeration[jax-scan-gini-choices-float32]": """
        kernels/jax_scan""",
    "operations/test_frontier.py::test_it_is_the_enumeration[numpy-": "frontiers",
    "operations/test_real.py::test_a_batch_with_a_unit_per_instance[": "real",
    "operations/test_bad_scores.py::test_the_reference_has_the_same_nan[": "reference",
    "operations/test_warmup.py::test_warmup_compiles_what_calls_need_and_draws_nothing[numpy]": "warming",
    "operations/test_warmup.py::test_a_first_call_that_waits_for_the_compiler_says_so_once[": """
        kernels/compile_log""",
    "for_torch/test_torch_autograd.py::test_gradcheck_in_theta_and_gamma[knapsack-": """
        torch/__init__ torch/backend torch/operators torch/private torch/registration""",
    "for_torch/test_torch_modules.py::test_copies[Relax-": "torch/modules",
    "for_torch/test_distribution.py::test_kl_divergence_against_enumeration[close-": """
        torch/distribution torch/divergence""",
    "for_torch/test_pyepo.py::test_objectives_equal_those_of_a_solver[": "pyepo",
    "for_jax/test_jax_pytrees.py::test_a_round_trip_gives_an_equal_one[": "jax/pytrees",
    "for_jax/test_jax_distribution.py::test_kl_and_its_gradient[gini-gini]": """
        jax/__init__ jax/distribution jax/divergence""",
    "for_jax/test_jax_distribution.py::test_layers": "jax/layers",
    "kernels/test_numba_jax.py::test_xla_gets_what_python_gets[knapsack-vjp-": """
        kernels/numba/from_jax kernels/numba/handlers kernels/numba/tasks kernels/numba/xla""",
    "kernels/test_numba_jax.py::test_vmap_is_one_call[": "kernels/jax_calls",
    "kernels/test_triton.py::test_sweeps_against_the_reference[narrow-gini-knapsack]": """
        kernels/triton/__init__ kernels/triton/variants kernels/triton/from_torch kernels/triton/instances
        kernels/triton/launch kernels/triton/batch kernels/triton/kernels kernels/triton/ways
        kernels/triton/plan kernels/triton/registers kernels/triton/steps""",
    "kernels/test_triton.py::test_sweeps_against_the_reference[wide-shannon-at least]": """
        kernels/triton/math kernels/triton/memory""",
    "kernels/test_triton.py::test_sweeps_against_the_reference[shared-tsallis-top-k]": "kernels/triton/by_item",
    "kernels/test_triton.py::test_paths_against_the_reference[narrow-tsallis-knapsack]": "kernels/triton/paths",
    "kernels/test_triton_choices.py::test_sweeps_against_the_reference[gini-3]": """
        kernels/triton/options kernels/triton/frontier""",
    "kernels/test_triton_choices.py::test_paths_against_the_reference[2]": "kernels/triton/option_paths",
    "kernels/test_triton_choices.py::test_many_options_in_loops[optional]": "kernels/triton/many_options",
    "kernels/test_triton_pipeline.py::test_sweeps_against_the_reference[from and to]": """
        kernels/triton/pipeline kernels/triton/tiles""",
    "kernels/test_triton_pipeline.py::test_segments_against_the_reference[the last cell of a tile]": """
        kernels/triton/segments""",
    "kernels/test_triton_jax.py::test_vmap_becomes_one_launch": "kernels/triton/from_jax",
}
