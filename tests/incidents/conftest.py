import pytest


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not acknowledged is sent again after milliseconds instead of half a second."""
    monkeypatch.setattr("protocols.channel.FIRST_RETRY_S", 0.005)
    monkeypatch.setattr("protocols.channel.LAST_RETRY_S", 0.02)
