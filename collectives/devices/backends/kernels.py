"""CUDA source of the kernels that combine tensors through pointers, for a dtype, an operation and tensor counts.

One kernel serves every collective: it reads element i of all values, combines them in order, and writes the result into
element i of all outs; values and outs may be in any memory that the GPU can access. Each element is read before it is
written, by one thread, so an out may be a value. The text is plain C++ except for thread indices and float16, so a host
compiler can check its arithmetic.
"""

from __future__ import annotations

from functools import lru_cache

NAME = "gangline_combine"
"""Name of the kernel. Its arguments: a pointer for each value, one for each out, and the number of elements (int64)."""
BLOCK = 256
"""Threads per block."""

_TYPES = {  # by dtype: the type of an element, of sums and products, and of comparisons
    "float32": ("float", "float", "float"),
    "float64": ("double", "double", "double"),
    "float16": ("unsigned short", "float", "float"),
    "bfloat16": ("unsigned short", "float", "float"),
    "int8": ("signed char", "unsigned int", "int"),
    "int16": ("short", "unsigned int", "int"),
    "int32": ("int", "unsigned int", "int"),
    "int64": ("long long", "unsigned long long", "long long"),  # unsigned: overflow is defined
    "uint8": ("unsigned char", "unsigned int", "unsigned int"),
    "bool": ("unsigned char", "unsigned int", "unsigned int"),
}
_COMBINE = {
    "sum": "plus(a, b)",
    "mean": "plus(a, b)",
    "product": "times(a, b)",
    "min": "(a != a || is_less(a, b)) ? a : b",  # NaN wins, as in torch
    "max": "(a != a || is_less(b, a)) ? a : b",
}
_BOOL = {"sum": "a | b", "product": "a & b", "min": "a & b", "max": "a | b"}

_ARITHMETIC = """
template <typename V> __device__ inline V plus(V a, V b) { return a + b; }
template <typename V> __device__ inline V times(V a, V b) { return a * b; }
template <typename V> __device__ inline V over(V a, V b) { return a / b; }
template <typename V> __device__ inline bool is_less(V a, V b) { return a < b; }
#ifdef __CUDA_ARCH__
// cupy compiles with -ftz=true, by which operators take subnormal floats as 0; these instructions do not.
#define FLOAT(NAME, INSTRUCTION) __device__ inline float NAME(float a, float b) { \
  float c; asm(INSTRUCTION ".f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
FLOAT(plus, "add.rn")
FLOAT(times, "mul.rn")
FLOAT(over, "div.rn")
__device__ inline bool is_less(float a, float b) {
  int c; asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(c) : "f"(a), "f"(b)); return c;
}
#endif
"""
_CONVERT = {
    "float16": """
#ifdef __CUDA_ARCH__
__device__ inline float widen(T x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ inline T narrow(float x) { T y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
#else
inline float widen(T x) { _Float16 y; __builtin_memcpy(&y, &x, sizeof y); return (float)y; }
inline T narrow(float x) { _Float16 y = (_Float16)x; T z; __builtin_memcpy(&z, &y, sizeof z); return z; }
#endif
""",
    "bfloat16": """
union Bits { float value; unsigned int bits; };
__device__ inline float widen(T x) {
  Bits y; y.bits = (unsigned int)x << 16; return y.value;
}
__device__ inline T narrow(float x) {  // to the nearest, ties to even
  Bits y; y.value = x;
  if (x != x) return (T)0x7fc0;
  return (T)((y.bits + 0x7fffu + ((y.bits >> 16) & 1u)) >> 16);
}
""",
}
_PLAIN = """
__device__ inline A widen(T x) { return (A)x; }
__device__ inline T narrow(A x) { return (T)x; }
"""


@lru_cache(maxsize=256)
def source(dtype: str, op: str, values: int, outs: int) -> str:
    """Return the CUDA source of `NAME`, without a header, for a dtype by torch's name and numbers of tensors.

    Raises:
        KeyError: if the dtype is unknown, or does not support the operation.
    """
    element, added, compared = _TYPES[dtype]
    combine = _BOOL[op] if dtype == "bool" else _COMBINE[op]
    wide = compared if op in ("min", "max") else added
    read, written = [f"v{position}" for position in range(values)], [f"o{position}" for position in range(outs)]
    pointers = [*(f"const T* {name}" for name in read), *(f"T* {name}" for name in written)]
    steps = "\n".join(f"  r = combine(r, widen({name}));" for name in read[1:])
    loads = "\n".join(f"    const Pack p_{name} = reinterpret_cast<const Pack*>({name})[i];" for name in read)
    stores = "\n".join(f"    reinterpret_cast<Pack*>({name})[i] = r;" for name in written)
    return f"""
typedef {element} T;
typedef {wide} A;
{_ARITHMETIC}{_CONVERT.get(dtype, _PLAIN)}
__device__ inline A combine(A a, A b) {{ return {combine}; }}
__device__ inline T result({", ".join(f"T {name}" for name in read)}) {{
  A r = widen(v0);
{steps}
  return narrow({f"over(r, (A){values})" if op == "mean" else "r"});
}}
struct alignas(16) Pack {{ T e[16 / sizeof(T)]; }};
extern "C" __global__ void {NAME}({", ".join(pointers)}, long long count) {{
  const long long width = 16 / sizeof(T);
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long step = (long long)gridDim.x * blockDim.x;
  const bool aligned = (({" | ".join(f"(unsigned long long){name}" for name in (*read, *written))}) % 16) == 0;
  const long long packs = aligned ? count / width : 0;
  for (long long i = first; i < packs; i += step) {{
{loads}
    Pack r;
    for (int k = 0; k < width; ++k) r.e[k] = result({", ".join(f"p_{name}.e[k]" for name in read)});
{stores}
  }}
  for (long long i = packs * width + first; i < count; i += step) {{
    const T r = result({", ".join(f"{name}[i]" for name in read)});
    {" ".join(f"{name}[i] = r;" for name in written)}
  }}
}}
"""


def blocks(count: int, itemsize: int) -> int:
    """Return the number of blocks for ``count`` elements: one thread per 16 bytes, limited to enough for any GPU."""
    threads = -(-count * itemsize // 16)
    return max(1, min(-(-threads // BLOCK), 2048))
