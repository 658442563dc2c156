// registry.h - what the host registered: units, params, param groups. Names and shapes, no memory.
//
// Filled before strata_commit and constant afterwards. Indices are those the host knows. A param that is tied has an
// owner: the param whose storage it shares; everything that touches memory goes through the owner.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/manifest/settings.h"
#include "core/status.h"
#include "strata/iface/optimizer.h"
#include "strata/strata.h"

namespace strata {

uint64_t dtype_size(strata_dtype dtype);
const char* dtype_name(strata_dtype dtype);
inline bool is_weight_dtype(strata_dtype d) { return d == STRATA_F32 || d == STRATA_BF16 || d == STRATA_F16; }

bool is_utf8(std::string_view text);

constexpr int32_t kMostDimensions = 32;                      // as many as a checkpoint can hold
std::string shape_text(const int64_t* shape, int32_t ndim);  // "[64, 97]"

struct Param {
  std::string name;
  std::vector<int64_t> shape;
  uint64_t numel = 0;
  strata_dtype dtype = 0;
  uint32_t group = 0;
  bool frozen = false;
  bool tensor_model_parallel = false, shared = false;  // see the flags of strata.h
  uint32_t unit = 0;                                   // where the host registered it
  uint32_t owner = 0;                                  // itself, or the param it is tied to

  // Set by the layout, for owners only: where the storage lies.
  uint32_t home = 0;     // unit of the layout: `unit`, or the resident one
  uint32_t segment = 0;  // within that unit
  uint64_t offset = 0;   // first element within that segment
};

struct RegisteredUnit {
  std::string name;
  std::vector<uint32_t> params;
};

class Registry {
 public:
  explicit Registry(const OptimizerSettings& defaults);

  Status add_group(const strata_group_args& args, uint32_t* out);
  void drop_group();  // the last
  Status add_unit(const std::string& name, uint32_t* out);
  Status add_param(uint32_t unit, const strata_param_args& args, uint32_t* out);

  std::vector<strata_optim_group> groups;
  std::vector<bool> group_has_lr;  // false: follows the step's (or the manifest's) learning rate
  std::vector<RegisteredUnit> units;
  std::vector<Param> params;

  // Settings that were given, where NaN was not.
  static void set_given(const strata_group_args& given, strata_optim_group* group);

  const Param& owner_of(uint32_t param) const { return params[params[param].owner]; }
  // Of everything that must be equal on all ranks.
  uint64_t fingerprint() const;

 private:
  std::unordered_map<std::string, uint32_t> unit_names_, param_names_;
};

}  // namespace strata
