"""NPU descriptions for tests."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from smartprune import NPU

IDEAL = NPU(weight_bandwidth=math.inf, activation_bandwidth=math.inf)

BANDWIDTHS = st.sampled_from([math.inf, 0.25, 1, 3.5, 16])
SYSTOLIC = replace(IDEAL, dataflow="weight_stationary")

MACHINES = st.builds(
    NPU,
    rows=st.integers(1, 5),
    columns=st.integers(1, 4),
    lanes=st.integers(1, 4),
    dataflow=st.sampled_from(["output_stationary", "weight_stationary"]),
    weight_bandwidth=BANDWIDTHS,
    activation_bandwidth=BANDWIDTHS,
    buffer_bytes=st.sampled_from([4, 20, 100, 1 << 20]),
    weight_bits=st.sampled_from([4, 8, 16]),
    activation_bits=st.sampled_from([4, 8]),
    index_bytes=st.integers(0, 2),
)
