"""Everything private in torch that gradrein uses, by topic: a change of torch changes only these files."""

# The versions of torch that the whole suite was run on; docs/compatibility.md has those it was run on in part.
CHECKED = ("2.6.0", "2.9.1", "2.13.0", "2.15.0")
