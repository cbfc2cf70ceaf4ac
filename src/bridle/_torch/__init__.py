"""Everything private in torch that bridle uses, by topic: a change of torch changes only these files."""

# The versions of torch that the functions here were checked on.
CHECKED = ("2.13.0",)
