"""Differences that are meant, each with its reason. `docs/torch-suite.md` shows them."""

_WORDS = "asserts words of a message; ours has the same type and other words"

KNOWN = {
    "test_autograd.py::TestAutograd::test_grad": (
        "asserts the whole text of an error; ours begins with that text and goes on"
    ),
    "test_nn.py::TestNNDeviceTypeCPU::test_clip_grad_norm_error_if_nonfinite_cpu": (
        "clips by norms of order 0, -1 and -2, which are no norms; ours raises ArgumentError"
    ),
    "distributed/_composable/fsdp/test_fully_shard_clip_grad_norm_.py::TestClipGradNormWorldSize2"
    "::test_clip_grad_norm_1d": (
        "takes `full_tensor()` of the norm; ours is that number already, the same on every rank, in a plain tensor"
    ),
    "test_expanded_weights.py::TestExpandedWeightModuleCPU::test_per_sample_api_failing_cpu": (
        f"{_WORDS}; and ours adds up over several calls, where torch refuses the second"
    ),
    "test_expanded_weights.py::TestExpandedWeightModuleCPU::test_per_sample_api_compute_batch_size_cpu": _WORDS,
    "test_expanded_weights.py::TestExpandedWeightModuleCPU"
    "::test_per_sample_api_compute_batch_size_not_pytreeable_cpu": _WORDS,
}
