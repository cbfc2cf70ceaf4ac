"""What holds in every process that a test starts: gradrein's functions in torch's place, and ranks without GPUs."""

import os

if os.environ.get("TORCH_SUITE_RUNS") == "gradrein":
    import replacements

    replacements.install()
if os.environ.get("TORCH_SUITE_RANKS"):
    import ranks

    ranks.allow_cpu(int(os.environ["TORCH_SUITE_RANKS"]))
