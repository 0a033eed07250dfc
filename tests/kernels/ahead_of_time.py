"""The kernels compiled to machine code for A100, H100 and B200 without a GPU: they build, fit, do
not spill, and use the units they should.

Started by test_processes.py in a process without the interpreter. Proves nothing about speed or
races. The compiler's cache directory is given by TRITON_CACHE_DIR, so that a second run takes
seconds.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import cross_entropy, gt_score, paged_decode

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SHARED_MEMORY_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
# What the matrix products and the loads must have become: tensor cores, and copies
# that run beside them.
INSTRUCTIONS = {
    "sm_80": ("mma.sync", "cp.async"),
    "sm_90": ("wgmma", "cp.async.bulk.tensor"),
    "sm_100": ("tcgen05", "cp.async.bulk.tensor"),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(kernel, architecture, types, constants, *, num_warps, num_stages=3, odd=()):
    """Compile for an architecture. Pointers, and integers but those in `odd`, are divisible by 16,
    as the real sizes are: else no vector loads.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] in "*i" and name not in odd]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    target = GPUTarget("cuda", int(architecture[3:]), 32)
    return triton.compile(
        source, target=target, options={"num_warps": num_warps, "num_stages": num_stages}
    )


def tile_kernel(kernel, architecture, dtype="bf16"):
    tiles = cross_entropy.TILES["fp32" if dtype == "fp32" else architecture]
    types = dict.fromkeys(("N", "V", "D", "stride_n", "stride_v"), "i32") | {
        "targets_ptr": "*i64",
        "inv_temperature": "fp32",
    }
    types |= dict.fromkeys(("hidden", "weight", "grad_logits_ptr"), f"*{dtype}")
    if tiles.descriptors:
        types |= {
            "hidden": f"tensordesc<bf16[{tiles.block_n}, {tiles.block_d}]>",
            "weight": f"tensordesc<bf16[{tiles.block_v}, {tiles.block_d}]>",
        }
    types = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    constants = {
        "BLOCK_N": tiles.block_n,
        "BLOCK_V": tiles.block_v,
        "BLOCK_D": tiles.block_d,
        "GROUP_N": tiles.group_n,
        "DESCRIPTORS": tiles.descriptors,
    }
    return compiled(
        kernel,
        architecture,
        types,
        constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        odd=("N",),
    )


def row_kernel(kernel, architecture):
    types = {
        "targets_ptr": "*i64",
        "V": "i32",
        "inv_temperature": "fp32",
        "grad_logits_ptr": "*bf16",
    }
    types = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    return compiled(kernel, architecture, types, {"BLOCK": cross_entropy.ROW_BLOCK}, num_warps=8)


def attention_kernel(architecture):
    """32 query heads on 8 kv heads of 128."""
    blocks, kernel = gt_score.BLOCKS[architecture], gt_score._branch_attention_kernel
    integers = (
        "first_row",
        "M",
        "num_heads",
        *(name for name in kernel.arg_names if name.startswith("stride_")),
    )
    types = dict.fromkeys(kernel.arg_names, "*bf16") | dict.fromkeys(
        ("doc_ptr", "pre_ptr", "branch_ptr", "tiles_ptr"), "*i32"
    )
    types |= {"lse_ptr": "*fp32", "scale": "fp32"} | dict.fromkeys(integers, "i32")
    if blocks.descriptors:
        types |= dict.fromkeys(("k", "v"), f"tensordesc<bf16[{blocks.block_k}, 1, 128]>")
    constants = {
        "GROUP": 4,
        "HEAD_DIM": 128,
        "BLOCK_M": blocks.block_m,
        "BLOCK_K": blocks.block_k,
        "DESCRIPTORS": blocks.descriptors,
    }
    return compiled(
        kernel,
        architecture,
        types,
        constants,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        odd=("first_row", "M"),
    )


# 32 query heads on 8 kv heads, 16 rows
PAGED = {"PAGE": 256, "GROUP": 4, "BLOCK_G": 16, "HEAD_DIM": 128, "SPLITS": 8}


def paged_kernel(kernel, architecture):
    blocks = paged_decode.BLOCKS[architecture]
    constants = {
        name: value
        for name, value in (PAGED | {"BLOCK_K": blocks.block_k}).items()
        if name in kernel.arg_names
    }
    types = (
        dict.fromkeys(kernel.arg_names, "i32")
        | dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "out_ptr"), "*bf16")
        | {"scale": "fp32"}
    )
    types |= dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32") | dict.fromkeys(
        ("tables_ptr", "lengths_ptr"), "*i32"
    )
    return compiled(
        kernel,
        architecture,
        types,
        constants,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        odd=("table_width",),
    )


BUILDS = {
    "stats": lambda architecture: tile_kernel(cross_entropy._stats_kernel, architecture),
    "grad_logits": lambda architecture: tile_kernel(
        cross_entropy._grad_logits_kernel, architecture
    ),
    "stats_fp32": lambda architecture: tile_kernel(
        cross_entropy._stats_kernel, architecture, "fp32"
    ),
    "grad_logits_fp32": lambda architecture: tile_kernel(
        cross_entropy._grad_logits_kernel, architecture, "fp32"
    ),
    "row_stats": lambda architecture: row_kernel(cross_entropy._row_stats_kernel, architecture),
    "row_grad": lambda architecture: row_kernel(cross_entropy._row_grad_kernel, architecture),
    "branch_attention": attention_kernel,
    "paged_split": lambda architecture: paged_kernel(paged_decode._split_kernel, architecture),
    "paged_merge": lambda architecture: paged_kernel(paged_decode._merge_kernel, architecture),
}
MULTIPLIES = ("stats", "grad_logits", "branch_attention")


def resources(binary):
    """Registers and stack bytes of a thread; a spilled register lives on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", BUILDS)
def test_the_kernel_builds_and_fits(name, architecture):
    binary = BUILDS[name](architecture)
    usage = resources(binary)
    print(
        f"{name} {architecture}: {usage['REG']} registers, {usage['STACK']} bytes of stack, "
        f"{binary.metadata.shared} bytes of shared memory"
    )
    assert usage["STACK"] == 0, "registers are spilled to memory"
    assert binary.metadata.shared <= SHARED_MEMORY_BYTES[architecture]
    ptx = binary.asm["ptx"]
    assert not re.search(r"\b(atom|red)\.", ptx), (
        "atomics make the sum depend on the order of arrival"
    )
    for instruction in INSTRUCTIONS[architecture] if name in MULTIPLIES else ():
        assert instruction in ptx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_paged_decode_copies_pages_beside_its_products(architecture):
    """Tensor cores of the 16-row kind on every architecture, and asynchronous copies of 16 bytes
    into room for two blocks of keys and values.

    With four stages the page's number, which a block's address needs, took the place of the second
    block: every step waited for its keys.
    """
    binary = BUILDS["paged_split"](architecture)
    assert "mma.sync" in binary.asm["ptx"] and re.search(
        r"cp\.async\.cg\.shared\.global .*, 0x10", binary.asm["ptx"]
    )
    assert (
        binary.metadata.shared
        >= 2 * 2 * paged_decode.BLOCKS[architecture].block_k * PAGED["HEAD_DIM"] * 2
    )


def test_offsets_of_pages_are_64_bits_wide():
    """A page's number times its stride passes 2^31 when the layers are views of one tensor."""
    ttir = BUILDS["paged_split"]("sm_90").asm["ttir"]
    assert len(re.findall(r"tt\.addptr .*: !tt\.ptr<bf16>, i64", ttir)) == 2


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("grad_logits", "sm_90"), ("stats", "sm_80"), ("grad_logits", "sm_80")],
)
def test_offsets_of_tiles_are_64_bits_wide(name, architecture):
    """N * V passes 2^31 at 14,135 rows of the real vocabulary. Rows of h, W and dz are found with
    int64, columns inside a row with int32.
    """
    offsets = re.findall(
        r"tt\.addptr .*: tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+x(i\d+)>",
        BUILDS[name](architecture).asm["ttir"],
    )
    assert (
        offsets.count("i64")
        == {"stats": 2, "grad_logits": 3 if architecture == "sm_80" else 1}[name]
    )


if __name__ == "__main__":
    for name, build in BUILDS.items():
        for architecture in ARCHITECTURES:
            binary = build(architecture)
            print(name, architecture, resources(binary), binary.metadata.shared, flush=True)
