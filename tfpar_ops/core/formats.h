// The payload formats, one row each. This is the only list of them in C++: names, numbers, lengths, checks, the choice
// of a kernel on the CPU and on CUDA devices, and the attribute of the operations are generated from it. The list in
// Python is tfpar_ops/formats.py. FORMAT.md specifies each format, byte by byte.
//
//   X(ID, name, number, code_bits, codes, scale, smallest_block, largest_block, rounding, Kernel)
//
//   ID         TFPAR_ID is the number in C and C++
//   name       used in operations, messages and options
//   number     the kind in the header of a payload; 1 to 127
//   code_bits  bits per code
//   codes      codes per block: EVERY for one code per element; KEPT for `keep` codes, each with its position
//   scale      the block's scale: NONE, BYTE, or FLOAT, which is bfloat16 or float32 according to `scale_bits`
//   smallest_block, largest_block   limits of the elements per block, a power of two
//   rounding   NEAREST, or STOCHASTIC if the caller may choose stochastic rounding too
//   Kernel     the type that encodes and decodes a block; it has this name in kernels/*.h (CPU) and in cuda/*.cuh. The
//              files are listed at the end.
#ifndef TFPAR_OPS_CORE_FORMATS_H_
#define TFPAR_OPS_CORE_FORMATS_H_

// clang-format off: a table
#define TFPAR_FORMATS(X)                                                           \
  X(BF16, "bf16", 1, 16, EVERY, NONE,  1024, 1024,  NEAREST,    Cast<Bf16>)        \
  X(FP16, "fp16", 2, 16, EVERY, NONE,  1024, 1024,  NEAREST,    Cast<Fp16>)        \
  X(FP8,  "fp8",  3, 8,  EVERY, BYTE,  64,   4096,  NEAREST,    Fp8)               \
  X(INT8, "int8", 4, 8,  EVERY, FLOAT, 64,   4096,  STOCHASTIC, Integers<8>)       \
  X(INT4, "int4", 5, 4,  EVERY, FLOAT, 64,   4096,  STOCHASTIC, Integers<4>)       \
  X(INT2, "int2", 6, 2,  EVERY, FLOAT, 64,   4096,  STOCHASTIC, Integers<2>)       \
  X(SIGN, "sign", 7, 1,  EVERY, FLOAT, 64,   4096,  NEAREST,    Sign)              \
  X(TOPK, "topk", 8, 32, KEPT,  NONE,  64,   16384, NEAREST,    TopK)
// clang-format on

#define TFPAR_FORMAT_ENUMERATOR(ID, name, number, ...) TFPAR_##ID = number,
enum tfpar_kind { TFPAR_FORMATS(TFPAR_FORMAT_ENUMERATOR) };
#undef TFPAR_FORMAT_ENUMERATOR

#endif  // TFPAR_OPS_CORE_FORMATS_H_

// The files of the kernels, each once. To include them, define TFPAR_FORMAT_FILE(name) as the path of a file relative
// to this header, and include this header again.
#ifdef TFPAR_FORMAT_FILE
#include TFPAR_FORMAT_FILE(cast)
#include TFPAR_FORMAT_FILE(fp8)
#include TFPAR_FORMAT_FILE(integers)
#include TFPAR_FORMAT_FILE(sign)
#include TFPAR_FORMAT_FILE(topk)
#undef TFPAR_FORMAT_FILE
#endif
