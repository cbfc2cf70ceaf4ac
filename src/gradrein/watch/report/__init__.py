"""A `Report`, and how it is shown: text, JSON, an HTML page."""
