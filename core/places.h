// places.h - where a rank is: in the world, and in the groups that tensor and pipeline parallelism cut it into.
//
// Megatron's order: tensor-parallel ranks are neighbours, data-parallel ones come next, pipeline stages last. Whatever
// the engine shards, gathers and reduces, it does within a data-parallel group; a group holds one part of the model,
// and the world all of it. Errors and logs name ranks by their number in the world.
#pragma once

#include <string>

#include "core/status.h"

namespace strata {

struct Axis {
  int rank = 0, size = 1;
};

struct Places {
  Axis world, data, tensor, pipeline;

  static Status find(int rank, int world, int64_t tensors, int64_t stages, Places* out) {
    if (world % tensors != 0 || world / tensors % stages != 0) {
      return {STRATA_INVALID_ARGUMENT, "a world of " + std::to_string(world) + " ranks cannot be cut into models of " +
                                           std::to_string(tensors * stages) +
                                           " ranks, which tensor_model_parallel_size = " + std::to_string(tensors) +
                                           " x pipeline_model_parallel_size = " + std::to_string(stages) + " ask for"};
    }
    const auto tensor_size = static_cast<int>(tensors), stage_count = static_cast<int>(stages);
    const int data_size = world / tensor_size / stage_count;
    out->world = {rank, world};
    out->tensor = {rank % tensor_size, tensor_size};
    out->data = {rank / tensor_size % data_size, data_size};
    out->pipeline = {rank / tensor_size / data_size, stage_count};
    return Ok();
  }

  // Of how many parts the model is, and which one this rank's group holds.
  int parts() const { return tensor.size * pipeline.size; }
  int part() const { return pipeline.rank * tensor.size + tensor.rank; }
  // The number in the world of a rank of this data-parallel group; and of the rank that has our place in another's.
  int in_group(int data_rank) const { return at(part(), data_rank); }
  int in_part(int other) const { return at(other, data.rank); }
  std::string text() const {
    const auto one = [](const char* name, Axis a) {
      return name + std::to_string(a.rank) + " of " + std::to_string(a.size);
    };
    return one("data-parallel ", data) + one(", tensor-parallel ", tensor) + one(", pipeline stage ", pipeline);
  }
  std::string part_name() const {
    return "tp" + std::to_string(tensor.rank) + "of" + std::to_string(tensor.size) + "-pp" +
           std::to_string(pipeline.rank) + "of" + std::to_string(pipeline.size);
  }

 private:
  int at(int part, int data_rank) const {
    return (part / tensor.size * data.size + data_rank) * tensor.size + part % tensor.size;
  }
};

}  // namespace strata
