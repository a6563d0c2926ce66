"""Every method of torch's process groups and backends, by what the handle does with it.

A test compares the lists with the torch at hand and fails over what is in none: a new method is looked at before its
version of torch is called tested.
"""

from __future__ import annotations

# Operations that return a Work, each counted once in its group's channel.
COLLECTIVES = tuple(
    """
    allgather allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base
    barrier broadcast gather reduce reduce_scatter reduce_scatter_tensor_coalesced scatter _allgather_base
    _reduce_scatter_base all_gather_single all_gather_single_coalesced all_to_all_single gather_into_tensor
    gather_single reduce_scatter_single reduce_scatter_single_coalesced allreduce_sparse
    """.split()
)

# Asked of the group or backend that is there now.
FORWARDED = tuple(
    """
    name abort shutdown get_backend get_group_store
    _get_backend _get_backend_name _get_sequence_number_for_group _set_sequence_number_for_group
    _has_hooks _wait_for_pending_works _enable_collectives_timing _add_ephemeral_timeout _id _backend_id
    unregister_abort_hook unregister_post_hook unregister_pre_hook get_error memory_stats
    """.split()
)

# They leave something behind that a rebuilt group would not have, or go past the gate. They work as ever, and from then
# on the process is not checkpointed with its collectives.
REFUSED = tuple(
    """
    recv_anysource split_group merge_remote_group reconfigure get_reconfigure_handle new_window
    register_abort_hook register_post_hook register_pre_hook _register_on_completion_hook
    use_pg_for_symm_mem_rendezvous setUsePgForSymmMemRendezvous
    merge shrink split suspend resume allocate_tensor
    """.split()
)

# The handle's own.
OWN = tuple(
    """
    send recv monitored_barrier rank size set_timeout group_name group_desc bound_device_id _device_types
    _set_default_backend _register_backend _set_group_name _set_group_desc _start_coalescing _end_coalescing
    """.split()
)

# As torch has them: constants, and what no group of ours answers otherwise than the base.
INHERITED_GROUP = tuple(
    """
    BackendType CUSTOM GLOO MPI NCCL UCC UNDEFINED XCCL __module__ _pybind11_conduit_v1_ boxed unbox
    supports_reconfigure supports_window
    """.split()
)
INHERITED_BACKEND = tuple(
    """
    Options __module__ _pybind11_conduit_v1_ _set_group_uid bound_device_id eager_connect_single_device mem_allocator
    options supports_coalescing supports_reconfigure supports_shrinking supports_splitting supports_tensor_alloc
    supports_time_estimate supports_window
    """.split()
)
INHERITED_STORE = ("__module__", "_pybind11_conduit_v1_")
INHERITED_WORK = (
    "__module__",
    "_get_op_type",
    "_get_sequence_number",
    "_pybind11_conduit_v1_",
    "boxed",
    "timeout",
    "unbox",
)
