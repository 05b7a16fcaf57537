"""Names the environment variables that libraries of a training script read when they are loaded. Pure.

A worker that was forked with these libraries loaded can't follow a script that sets one of them, so such a script needs
an interpreter of its own. CUDA_VISIBLE_DEVICES is not among them: torch and the driver read it at a GPU's first use.
"""

from __future__ import annotations

import fnmatch

READ_AT_LOAD = (
    *(
        "OMP_*",
        "GOMP_*",
        "KMP_*",
        "MKL_*",
        "OPENBLAS_*",
        "BLIS_*",
        "VECLIB_*",
        "NUMEXPR_*",
        "DNNL_*",
        "ONEDNN_*",
    ),
    *("TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "PYTORCH_*", "ATEN_*", "TRITON_*", "NUMPY_*", "NPY_*"),
    *("CUDA_*", "CUDNN_*", "CUBLAS_*", "NVIDIA_*", "HIP_*", "ROCR_*", "HSA_*", "NCCL_*", "GLOO_*", "GRPC_*"),
)
# scikit-learn, Lightning and others set these on import; torch's own libraries don't read them when they are loaded
READ_LATER = (
    "CUDA_VISIBLE_DEVICES",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)


def is_read_at_load(name: str) -> bool:
    return name not in READ_LATER and any(fnmatch.fnmatchcase(name, pattern) for pattern in READ_AT_LOAD)
