"""A box for each test: overlay view, bubblewrap, policy."""

from collections.abc import AsyncIterator

import pytest

from tests.isolation.boxes import Box, open_box
from tests.places import Place


@pytest.fixture
async def box(place: Place) -> AsyncIterator[Box]:
    async with open_box(place) as made:
        yield made
