#include "core/plugins/plugin_slots.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/plugins/event.h"
#include "core/plugins/host.h"
#include "strata/iface/checkpoint.h"
#include "strata/iface/collective.h"
#include "strata/iface/device.h"
#include "strata/iface/offload.h"
#include "strata/iface/optimizer.h"

namespace strata {
namespace {

// --- defaults of optional slots -------------------------------------------------------------------------------------

strata_status unimplemented(const char* text) { return keep_failure({STRATA_UNIMPLEMENTED, text}); }

strata_status STRATA_CALL no_alloc_pinned(strata_device*, uint64_t, void** out) {
  if (out) *out = nullptr;
  return unimplemented("this device has no page-locked memory (alloc_pinned)");
}
void STRATA_CALL no_free_pinned(strata_device*, void*) {}

strata_status STRATA_CALL cpu_stream_create(strata_device*, int32_t, strata_stream* out) {
  *out = {sizeof(strata_stream), STRATA_ABI_MINOR, STRATA_CPU, 0, nullptr};
  return STRATA_OK;
}
void STRATA_CALL cpu_stream_destroy(strata_device*, strata_stream*) {}
strata_status STRATA_CALL cpu_stream_wait_host(strata_device*, const strata_stream*) { return STRATA_OK; }
strata_status STRATA_CALL cpu_stream_record(strata_device*, const strata_stream*, strata_event* event) {
  event->set(Ok());
  return STRATA_OK;
}

strata_status STRATA_CALL cpu_marker_create(strata_device*, strata_marker** out) {
  *out = nullptr;
  return STRATA_OK;
}
void STRATA_CALL cpu_marker_destroy(strata_device*, strata_marker*) {}
strata_status STRATA_CALL cpu_marker_record(strata_device*, strata_marker*, const strata_stream*) { return STRATA_OK; }
strata_status STRATA_CALL cpu_stream_wait_marker(strata_device*, const strata_stream*, strata_marker*) {
  return STRATA_OK;
}
strata_status STRATA_CALL cpu_marker_wait_host(strata_device*, strata_marker*) { return STRATA_OK; }

strata_status STRATA_CALL no_fold(strata_device*, const strata_fold_item*, uint64_t, uint32_t, const strata_stream*) {
  return unimplemented("this device folds one by one (fold)");
}

strata_status STRATA_CALL no_timed_marker(strata_device*, strata_marker** out) {
  *out = nullptr;
  return unimplemented("this device keeps no times of its work (marker_create_timed)");
}
strata_status STRATA_CALL no_elapsed(strata_device*, strata_marker*, strata_marker*, int64_t*) {
  return unimplemented("this device keeps no times of its work (marker_elapsed)");
}

strata_status STRATA_CALL no_map(strata_offload*, strata_region, void** out) {
  if (out) *out = nullptr;
  return unimplemented("regions of this tier have no address (map)");
}

strata_status STRATA_CALL no_register_memory(strata_offload*, void*, uint64_t) { return STRATA_OK; }
void STRATA_CALL no_unregister_memory(strata_offload*, void*) {}
strata_status STRATA_CALL no_alloc_for(strata_offload*, uint64_t, uint32_t, const char*, strata_region* out) {
  *out = 0;
  return unimplemented("this tier makes all regions alike (alloc_for)");
}

strata_status STRATA_CALL no_split(strata_comm*, int32_t, int32_t, const strata_coll_args*, strata_comm** out) {
  if (out) *out = nullptr;
  return unimplemented("this collective serves the whole world only (split)");
}

// --- the table ------------------------------------------------------------------------------------------------------

using AnyFunction = void (*)();

struct Slot {
  const char* name;
  size_t offset;
  AnyFunction fallback;  // NULL: the slot is required
  int group;             // optional slots of one group (not 0) are filled all or none
};

struct Interface {
  const char* id;
  size_t frozen_size;  // of minor 0: no table is ever shorter
  size_t known_size;   // of the header this core was built with
  std::vector<Slot> slots;
};

#define END_OF(type, field) (offsetof(type, field) + sizeof(type::field))
#define REQUIRED(type, field) \
  Slot { #field, offsetof(type, field), nullptr, 0 }
#define OPTIONAL(type, field, fallback, group) \
  Slot { #field, offsetof(type, field), reinterpret_cast < AnyFunction>(fallback), group }

Interface device() {
  using T = strata_device_api;
  return {STRATA_DEVICE,
          END_OF(T, marker_wait_host),
          sizeof(T),
          {REQUIRED(T, open),
           REQUIRED(T, close),
           REQUIRED(T, caps),
           REQUIRED(T, alloc),
           REQUIRED(T, free),
           OPTIONAL(T, alloc_pinned, no_alloc_pinned, 1),
           OPTIONAL(T, free_pinned, no_free_pinned, 1),
           REQUIRED(T, copy),
           REQUIRED(T, fill),
           REQUIRED(T, cast),
           REQUIRED(T, accumulate),
           REQUIRED(T, square_sums),
           REQUIRED(T, find_nonfinite),
           OPTIONAL(T, stream_create, cpu_stream_create, 2),
           OPTIONAL(T, stream_destroy, cpu_stream_destroy, 2),
           OPTIONAL(T, stream_wait_host, cpu_stream_wait_host, 2),
           OPTIONAL(T, stream_record, cpu_stream_record, 2),
           OPTIONAL(T, marker_create, cpu_marker_create, 2),
           OPTIONAL(T, marker_destroy, cpu_marker_destroy, 2),
           OPTIONAL(T, marker_record, cpu_marker_record, 2),
           OPTIONAL(T, stream_wait_marker, cpu_stream_wait_marker, 2),
           OPTIONAL(T, marker_wait_host, cpu_marker_wait_host, 2),
           OPTIONAL(T, fold, no_fold, 0),
           OPTIONAL(T, marker_create_timed, no_timed_marker, 3),
           OPTIONAL(T, marker_elapsed, no_elapsed, 3)}};
}

Interface collective() {
  using T = strata_collective_api;
  return {STRATA_COLLECTIVE,
          END_OF(T, exchange),
          sizeof(T),
          {REQUIRED(T, open), REQUIRED(T, close), REQUIRED(T, caps), REQUIRED(T, alloc), REQUIRED(T, free),
           REQUIRED(T, all_gather), REQUIRED(T, reduce_scatter), REQUIRED(T, all_reduce), REQUIRED(T, broadcast),
           REQUIRED(T, all_to_all), REQUIRED(T, barrier), REQUIRED(T, abort), REQUIRED(T, exchange),
           OPTIONAL(T, split, no_split, 0)}};
}

Interface offload() {
  using T = strata_offload_api;
  return {STRATA_OFFLOAD,
          END_OF(T, write),
          sizeof(T),
          {REQUIRED(T, open), REQUIRED(T, close), REQUIRED(T, caps), REQUIRED(T, alloc), REQUIRED(T, free),
           OPTIONAL(T, map, no_map, 0), REQUIRED(T, read), REQUIRED(T, write),
           OPTIONAL(T, register_memory, no_register_memory, 1), OPTIONAL(T, unregister_memory, no_unregister_memory, 1),
           OPTIONAL(T, alloc_for, no_alloc_for, 0)}};
}

Interface optimizer() {
  using T = strata_optimizer_api;
  return {STRATA_OPTIMIZER,
          END_OF(T, import_array),
          sizeof(T),
          {REQUIRED(T, open), REQUIRED(T, close), REQUIRED(T, layout), REQUIRED(T, scalars), REQUIRED(T, step),
           REQUIRED(T, export_array), REQUIRED(T, import_array)}};
}

Interface checkpoint() {
  using T = strata_checkpoint_api;
  return {STRATA_CHECKPOINT,
          END_OF(T, may_replace),
          sizeof(T),
          {REQUIRED(T, open), REQUIRED(T, close), REQUIRED(T, write), REQUIRED(T, commit), REQUIRED(T, abandon),
           REQUIRED(T, load_open), REQUIRED(T, load_info), REQUIRED(T, load_read), REQUIRED(T, load_close),
           REQUIRED(T, export_weights), REQUIRED(T, may_replace)}};
}
#undef END_OF
#undef REQUIRED
#undef OPTIONAL

const Interface* find_interface(const std::string& id) {
  static const std::vector<Interface> all = {device(), collective(), offload(), optimizer(), checkpoint()};
  for (const Interface& entry : all)
    if (id == entry.id) return &entry;
  return nullptr;
}

AnyFunction slot_at(const void* table, const Slot& slot) {
  AnyFunction f = nullptr;
  std::memcpy(&f, static_cast<const char*>(table) + slot.offset, sizeof f);
  return f;
}

// The name of a slot of the same group that is filled while `slot` is not, or NULL.
const char* filled_partner(const Interface& entry, const Slot& slot, const void* table) {
  for (const Slot& other : entry.slots)
    if (slot.group != 0 && other.group == slot.group && slot_at(table, other)) return other.name;
  return nullptr;
}

}  // namespace

bool is_known_interface(const std::string& id) { return find_interface(id) != nullptr; }

Status complete_table(const std::string& plugin, const std::string& interface_id, const void* table,
                      CompletedTable* out) {
  const auto bad = [&](const std::string& text) {
    return Status(STRATA_FAILED_PRECONDITION, "plugin " + plugin + ": " + interface_id + " " + text);
  };
  const Interface* entry = find_interface(interface_id);
  if (!entry) return bad("is no interface of this core");
  uint32_t given_size = 0;
  std::memcpy(&given_size, table, sizeof given_size);
  if (given_size < entry->frozen_size)
    return bad("table has " + std::to_string(given_size) + " bytes, at least " + std::to_string(entry->frozen_size) +
               " are needed (its struct_size is wrong, or the plugin was built with other headers)");

  const size_t words = (entry->known_size + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
  CompletedTable copy(new std::max_align_t[words]);
  std::memset(copy.get(), 0, words * sizeof(std::max_align_t));  // with the padding, which initialization leaves
  std::memcpy(copy.get(), table, std::min<size_t>(given_size, entry->known_size));
  const uint32_t known_size = static_cast<uint32_t>(entry->known_size);
  std::memcpy(copy.get(), &known_size, sizeof known_size);
  for (const Slot& slot : entry->slots) {
    if (slot_at(copy.get(), slot)) continue;
    if (!slot.fallback) return bad("slot \"" + std::string(slot.name) + "\" is missing");
    if (const char* partner = filled_partner(*entry, slot, copy.get()))
      return bad("slot \"" + std::string(slot.name) + "\" is missing beside \"" + partner + "\"");
  }
  for (const Slot& slot : entry->slots)
    if (!slot_at(copy.get(), slot))
      std::memcpy(reinterpret_cast<char*>(copy.get()) + slot.offset, &slot.fallback, sizeof slot.fallback);
  *out = std::move(copy);
  return Ok();
}

const std::vector<std::string>& host_interface_ids() {
  static const std::vector<std::string> ids = {STRATA_HOST_SYNC, STRATA_HOST_EXECUTOR, STRATA_HOST_PLUGINS};
  return ids;
}

}  // namespace strata
