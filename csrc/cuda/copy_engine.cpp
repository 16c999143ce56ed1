#include "copy_engine.h"

#include "../check.h"

namespace ulysses_ops {
namespace {

void copy_3d(const PitchedCopy& copy, char* dst, const char* src, cudaStream_t stream) {
  const auto rows_per_slice = [](int64_t slice_pitch, int64_t pitch) {
    return static_cast<size_t>(slice_pitch / pitch);
  };
  cudaMemcpy3DParms params{};
  const auto width = static_cast<size_t>(copy.row_bytes);
  params.srcPtr = {const_cast<char*>(src), static_cast<size_t>(copy.src_pitch), width,
                   rows_per_slice(copy.src_slice_pitch, copy.src_pitch)};
  params.dstPtr = {dst, static_cast<size_t>(copy.dst_pitch), width,
                   rows_per_slice(copy.dst_slice_pitch, copy.dst_pitch)};
  params.extent = {width, static_cast<size_t>(copy.num_rows), static_cast<size_t>(copy.num_slices)};
  params.kind = cudaMemcpyDefault;
  UOPS_CUDA_CHECK(cudaMemcpy3DAsync(&params, stream));
}

}  // namespace

void issue_copy(const PitchedCopy& copy, char* dst_base, const char* src_base,
                cudaStream_t stream) {
  char* dst = dst_base + copy.dst_offset;
  const char* src = src_base + copy.src_offset;
  if (copy.num_rows == 1) {
    for (int64_t slice = 0; slice < copy.num_slices; ++slice) {
      UOPS_CUDA_CHECK(cudaMemcpyAsync(dst + slice * copy.dst_slice_pitch,
                                      src + slice * copy.src_slice_pitch, copy.row_bytes,
                                      cudaMemcpyDefault, stream));
    }
    return;
  }
  // A 3-D copy knows slices as whole numbers of rows, each slice behind the one before.
  const auto is_on_rows = [&](int64_t slice_pitch, int64_t pitch) {
    return slice_pitch % pitch == 0 && slice_pitch >= copy.num_rows * pitch;
  };
  const bool slices_on_rows = is_on_rows(copy.src_slice_pitch, copy.src_pitch) &&
                              is_on_rows(copy.dst_slice_pitch, copy.dst_pitch);
  if (copy.num_slices > 1 && slices_on_rows) {
    copy_3d(copy, dst, src, stream);
    return;
  }
  for (int64_t slice = 0; slice < copy.num_slices; ++slice) {
    UOPS_CUDA_CHECK(cudaMemcpy2DAsync(dst + slice * copy.dst_slice_pitch, copy.dst_pitch,
                                      src + slice * copy.src_slice_pitch, copy.src_pitch,
                                      copy.row_bytes, copy.num_rows, cudaMemcpyDefault, stream));
  }
}

}  // namespace ulysses_ops
