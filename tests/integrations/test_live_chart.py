import sys
import types

import pytest


@pytest.fixture
def shown(monkeypatch):
    """IPython's display, as far as the chart uses it: what was shown, and what each update showed."""
    try:
        import IPython.display as display
    except ImportError:
        display = types.ModuleType("IPython.display")
        monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
        monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.delitem(sys.modules, "gradrein.integrations.notebook", raising=False)
    pages = []

    class Handle:
        def update(self, page):
            pages.append(page)

    def show(page, display_id=False):
        assert display_id is True
        pages.append(page)
        return Handle()

    monkeypatch.setattr(display, "HTML", str, raising=False)
    monkeypatch.setattr(display, "display", show, raising=False)
    yield pages
    sys.modules.pop("gradrein.integrations.notebook", None)


def test_the_chart_is_redrawn_in_place_and_bounded(shown):
    from gradrein.integrations.notebook import live_chart

    draw = live_chart(period=0.0)
    for step in range(3000):
        draw({"step": float(step), "loss": 1 / (step + 1), "norm": float("nan") if step == 5 else 2.0})
    assert len(shown) == 3000
    assert "step 2999" in shown[-1]
    assert len(shown[-1]) < 20_000


def test_it_is_redrawn_no_more_often_than_asked(shown):
    from gradrein.integrations.notebook import live_chart

    draw = live_chart(period=1e9)
    for step in range(100):
        draw({"step": float(step), "loss": 1.0, "norm": 2.0, "opt": 1.0})
    assert len(shown) == 1


def test_outside_of_a_notebook_nothing_can_be_redrawn(shown, monkeypatch):
    import IPython.display as display

    monkeypatch.setattr(display, "display", lambda page, display_id: shown.append(page))
    from gradrein.integrations.notebook import live_chart

    draw = live_chart(period=0.0)
    for step in range(5):
        draw({"step": float(step), "loss": 1.0, "norm": 2.0})
    draw.close()
    assert len(shown) == 1
