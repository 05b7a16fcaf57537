"""torchrun's long options as of torch 2.15; an older torch has a part of them.

Source: torch.distributed.run.get_args_parser() of torch 2.15.0, which adds --log-line-prefix-template and
--print-completion to those of 2.13.
"""

_WITH_VALUE = """
    --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval
    --start-method --event-log-handler --role --log-dir --redirects --tee --log-line-prefix-template
    --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr --master-port
    --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --print-completion
"""
WITH_VALUE = frozenset(_WITH_VALUE.split())
SWITCHES = frozenset({"--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank"})
