"""Code in the text of a report is marked as code on its page, and is code that runs."""

import re

from gradrein.watch.report.html import marked, to_html
from gradrein.watch.report.report import report_on

from .test_findings import cubed


def test_names_are_code_and_everything_is_escaped():
    assert marked("use `auto`") == "use <code>auto</code>"
    assert marked("`<script>` & `") == "<code>&lt;script&gt;</code> &amp; `"


def test_no_backtick_is_left_on_the_page():
    text = re.sub(r"<style>.*?</style>|<pre>.*?</pre>", "", to_html([report_on(cubed())]), flags=re.DOTALL)
    assert "<code>gradrein.per_sample(losses, model).norms()</code>" in text  # losses come first
    assert "`" not in text
