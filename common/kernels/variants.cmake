# One .cc per SIMD variant, each compiled for its own instruction set; kernels.cc chooses among them at run time.
# No variant may contract a * b + c or reorder: all give the same bits.
# Unswitching would copy every loop for each flag in it: a third more code, no faster.
# Under sanitizers the loops are for checking: optimising what they add to them takes minutes.
set(KERNEL_OPTIMISATION -O3 -fno-unswitch-loops)
if(PERSEUS_SANITIZE)
  set(KERNEL_OPTIMISATION -O1)
endif()
set(KERNEL_OPTIONS ${KERNEL_OPTIMISATION} -ffp-contract=off -fno-math-errno -fno-trapping-math)
set(WIDE_KERNEL_OPTIONS ${KERNEL_OPTIONS})
if(PERSEUS_SANITIZE)
  # The same loops as the portable ones, where undefined behaviour shows: here it is what they read and write.
  list(APPEND WIDE_KERNEL_OPTIONS -fno-sanitize=undefined)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC moves a frame to the heap without the alignment that its 64-byte vectors have in it (GCC bug 110027).
    list(APPEND WIDE_KERNEL_OPTIONS --param=asan-use-after-return=0)
  endif()
endif()
set(PORTABLE_KERNEL_OPTIONS ${KERNEL_OPTIONS})
if(PERSEUS_SANITIZE STREQUAL "thread" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64|aarch64|arm64)$")
  # The tests of the kernels are left out there, and all others run the widest ones.
  list(APPEND PORTABLE_KERNEL_OPTIONS -fno-sanitize=thread)
endif()
set_source_files_properties(kernels/variant_portable.cc PROPERTIES COMPILE_OPTIONS "${PORTABLE_KERNEL_OPTIONS}")
set_source_files_properties(kernels/variant_neon.cc PROPERTIES COMPILE_OPTIONS "${KERNEL_OPTIONS}")
set_source_files_properties(kernels/variant_avx2.cc PROPERTIES
                            COMPILE_OPTIONS "${WIDE_KERNEL_OPTIONS};-mavx2;-mf16c;-mno-fma")
set_source_files_properties(kernels/variant_avx512.cc PROPERTIES COMPILE_OPTIONS
                            "${WIDE_KERNEL_OPTIONS};-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mf16c;-mprefer-vector-width=512")

# HEADER_FILE_ONLY keeps a source of another architecture out of the build.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  set_source_files_properties(kernels/variant_neon.cc PROPERTIES HEADER_FILE_ONLY TRUE)
else()
  set_source_files_properties(kernels/variant_avx2.cc kernels/variant_avx512.cc PROPERTIES HEADER_FILE_ONLY TRUE)
endif()
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64|aarch64|arm64)$")
  set_source_files_properties(kernels/variant_neon.cc PROPERTIES HEADER_FILE_ONLY TRUE)
endif()
