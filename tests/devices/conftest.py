import sys

# What is in there runs in processes of its own: test_on_devices.py.
collect_ignore_glob = [] if "plugin" in sys.modules else ["on_device/*"]
