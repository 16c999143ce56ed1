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

// A flat copy inside the GPU takes so much of its memory's bandwidth that copies to peers slow
// down; a pitched one runs at a rate that leaves them theirs (docs/design/measured.md).
constexpr int64_t kGentleFrom = int64_t{8} << 20;
constexpr int64_t kGentleRow = 4096;

}  // namespace

void issue_own_copy(const PitchedCopy& copy, char* dst_base, const char* src_base,
                    cudaStream_t stream) {
  if (copy.num_rows > 1 || copy.num_slices > 1 || copy.row_bytes < kGentleFrom) {
    issue_copy(copy, dst_base, src_base, stream);
    return;
  }
  PitchedCopy half = copy;
  half.num_rows = copy.row_bytes / kGentleRow;
  half.row_bytes = kGentleRow / 2;
  half.src_pitch = half.dst_pitch = kGentleRow;
  PitchedCopy rest = copy;
  rest.row_bytes = copy.row_bytes % kGentleRow;
  for (int64_t offset : {int64_t{0}, half.row_bytes}) {
    issue_copy(half, dst_base + offset, src_base + offset, stream);
  }
  if (rest.row_bytes > 0) {
    const int64_t done = copy.row_bytes - rest.row_bytes;
    issue_copy(rest, dst_base + done, src_base + done, stream);
  }
}

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
