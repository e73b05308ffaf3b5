# How the codecs are compiled: as setup.py does, which says why.
CORE_FLAGS := -std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math
V3 := -mavx2 -mfma -mf16c -mbmi -mbmi2
V4 := $(V3) -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mprefer-vector-width=512
X86 := $(filter x86_64,$(shell uname -m))
# $(call target_flags,codec_v3): those of one instruction set.
target_flags = $(if $(X86),$(if $(filter codec_v3,$1),$(V3))$(if $(filter codec_v4,$1),$(V4)))
CODECS := codec codec_baseline codec_v3 codec_v4 crc32c
