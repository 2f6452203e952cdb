"""Data sets of the study: planted truth, real logs, and a user's own copy of Criteo. All give `Batch`es of dense counts, ids and labels.

    from studies.loka.data import Planted, TABLES
    Planted(seed=1).batch(0, 1024)
    TABLES["movielens-100k"](seed=0).batch(0, 1024, part="test")
"""

from studies.loka.data.batch import Batch
from studies.loka.data.planted import Planted
from studies.loka.data.real import TABLES
from studies.loka.data.table import Table

__all__ = ["TABLES", "Batch", "Planted", "Table"]
