import pytest

from exchange import tiny
from tamis.data.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabularies():
    source, target = tiny.sentences()
    return Vocabulary.train(source, 100), Vocabulary.train(target, 110)
