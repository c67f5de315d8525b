from jaxrl_llm.rewards import length_penalty


def test_price_per_token():
    assert length_penalty.score(250, per_token=0.001) == -0.25
    assert str(length_penalty.score(0, per_token=0.001)) == "0.0"
