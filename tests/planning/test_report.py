"""What a plan prints, line by line."""

from types import SimpleNamespace

from jaxrl_llm.planning import report
from jaxrl_llm.planning.hlo import Traffic


def test_collectives_are_named_with_what_they_send_the_largest_first():
    traffic = Traffic({"all-gather": 2e9, "reduce-scatter": 31.25e9, "all-reduce": 1e6})
    assert report._kinds(SimpleNamespace(traffic=traffic)) == "reduce-scatter 31.2, all-gather 2.0"
    assert report._kinds(SimpleNamespace(traffic=Traffic())) == ""
