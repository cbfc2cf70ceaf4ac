"""Everything private in torch that bridle touches, by topic. A new torch changes only these files."""

# The versions of torch that the functions here were checked on.
CHECKED = ("2.13.0", "2.15.0")
