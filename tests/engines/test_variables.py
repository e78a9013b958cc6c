"""Variables of an engine's processes, and those of the ranks in them."""

from __future__ import annotations

import pytest

from dtk.engines import variables_of, without_place

pytestmark = pytest.mark.fast


def test_a_rank_keeps_what_the_user_has_set_and_not_where_the_engine_is():
    own = {"OMPI_MCA_btl": "tcp,self", "HOROVOD_FUSION_THRESHOLD": "0", "SLURM_JOB_ID": "7"}
    place = {"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "1", "TF_CONFIG": "{}", "DTK_RUN": "1"}
    assert without_place(own) == own
    # mpirun has set all of Open MPI's variables for its processes
    assert without_place(own | place).keys() == own.keys() - {"OMPI_MCA_btl"}


def test_ranks_of_one_host_are_counted_there():
    told = [variables_of(rank, ["a", "b", "a"], "a", 1, "secret") for rank in range(3)]
    places = [[one[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] for one in told]
    assert places == [["0", "0", "2"], ["1", "0", "1"], ["2", "1", "2"]]
