// tensors.h - whole tensors in and out: the host writes or reads a param, whoever owns which piece of it.
//
// All ranks walk the same pieces: a piece lies in one owner's slice and fits the staging buffer. Writing broadcasts
// the root's values; each rank keeps what it owns, and everybody the weight where it is kept whole. Reading
// broadcasts from the owner. Values travel through staging memory on the device, and beside it through the host's, from
// where what lies in host memory is reached. Runs with no update under way; host thread.
#pragma once

#include "core/comm_queue.h"
#include "core/gradients/gradients.h"
#include "core/states.h"

namespace strata {

class Tensors {
 public:
  Tensors(const Registry& registry, const Layout& layout, const Device& device, const Collective& collective,
          CommQueue& queue, Weights& weights, const Gradients& gradients, States& states);

  static constexpr uint64_t kPieceBytes = 1u << 20, kStagingBytes = 2 * kPieceBytes;  // and one on the host
  Status allocate();

  // This rank's part of the arguments; all ranks agree on the answers before any of them starts.
  Status check_write(uint32_t param, const strata_tensor* value, int32_t root) const;
  Status check_read(uint32_t param, const std::string& array, const strata_tensor& out) const;
  Status write(uint32_t param, const strata_tensor* value, int32_t root);
  Status read(uint32_t param, const std::string& array, const strata_tensor& out);

  // Elements [first, first + count) of a segment, which this rank owns: one canonical array or "weight" out into host
  // memory ...
  Status export_owned(uint32_t unit, uint32_t segment, const std::string& array, uint64_t first, uint64_t count,
                      void* out);
  // ... and in. "weight" is in the segment's dtype, arrays are F32; "master" writes the weight, too.
  Status import_owned(uint32_t unit, uint32_t segment, const std::string& array, uint64_t first, uint64_t count,
                      const void* in);
  // The whole weight's elements from host memory, where it is kept whole.
  Status import_whole(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, const void* in);

 private:
  struct Piece {
    Range segment;   // elements of the segment
    uint64_t begin;  // the same place in the param
    int owner;
  };
  std::vector<Piece> cut(const Param& p) const;
  Status check_tensor(const Param& p, const strata_tensor& t, bool fp32_only) const;
  Status broadcast(const Param& p, const Piece& piece, strata_dtype dtype, int root);
  Status keep(const Param& p, const Piece& piece);
  // The same for one array whose update runs where `values` lie.
  Status export_array(uint32_t unit, uint32_t segment, uint32_t index, uint64_t first, uint64_t count, char* values);
  Status import_array(uint32_t unit, uint32_t segment, uint32_t index, uint64_t first, uint64_t count,
                      const char* values);
  Status export_weight(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, char* out);
  Status import_weight(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, const char* in);
  // Between this rank's shard in a tier without addresses and memory that need not stay: through host_.
  Status move_weight(bool write, uint32_t unit, const Region& region, uint64_t offset, uint64_t bytes, char* memory);
  Status export_grad(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, char* out);
  Status find_array(uint32_t unit, uint32_t segment, const std::string& array, uint32_t* index) const;
  template <class Fn>
  Status in_pieces(uint64_t count, Fn fn);

  const Registry& registry_;
  const Layout& layout_;
  const Device& device_;
  const Collective& collective_;
  CommQueue& queue_;
  Weights& weights_;
  const Gradients& gradients_;
  States& states_;
  Memory staging_;  // what travels between ranks
  Memory native_;   // the same in the host's dtype
  Memory host_;     // the same in host memory
};

}  // namespace strata
