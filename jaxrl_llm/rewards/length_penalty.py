"""The length reward: a price for every response token."""


def score(response_length: int, *, per_token: float) -> float:
    """`-per_token * response_length`; 0 for an empty response.

    Args:
        response_length: tokens of the response, the end token included.
        per_token: price of one token, >= 0 to penalise length.
    """
    return -per_token * response_length if response_length else 0.0
