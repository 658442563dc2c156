// variant.cc - one tiny plugin, compiled several times; each VARIANT_x is wrong, old or new in one way.
//
// The slots do nothing: the loader never calls them. What matters is which are filled and what the sizes say.
#include <cstddef>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "strata/iface/device.h"
#include "strata/iface/offload.h"
#include "strata/plugin.h"

namespace {

template <class R, class... A>
R nothing(A...) {
  if constexpr (!std::is_void_v<R>) return R{};
}
template <class R, class... A>
using Function = R (*)(A...);
// Becomes a function of whatever signature the slot it is assigned to has.
struct Fill {
  template <class R, class... A>
  operator Function<R, A...>() const {
    return &nothing<R, A...>;
  }
};
constexpr Fill kFill{};

// A table of a later header: one slot more than anybody here knows.
struct LongOffload {
  strata_offload_api known;
  void (*added_later)();
};

const LongOffload offload = [] {
  LongOffload t{};
  t.known.struct_size = sizeof(strata_offload_api);
  t.known.open = kFill;
  t.known.close = kFill;
  t.known.caps = kFill;
  t.known.alloc = kFill;
  t.known.free = kFill;
  t.known.read = kFill;
  t.known.write = kFill;
#if defined(VARIANT_LONGER_TABLE)
  t.known.struct_size = sizeof(LongOffload);
  t.known.abi_minor = 7;
  t.added_later = [] {};
#elif defined(VARIANT_OLDER_TABLE)
  // From before this slot: what lies behind the table is none of its.
  t.known.struct_size = offsetof(strata_offload_api, register_memory);
  t.known.register_memory = [](strata_offload*, void*, uint64_t) -> strata_status { return STRATA_INTERNAL; };
#elif defined(VARIANT_HALF_OFFLOAD)
  t.known.register_memory = kFill;
#elif defined(VARIANT_SHORT_TABLE)
  t.known.struct_size = offsetof(strata_offload_api, write);
#elif defined(VARIANT_MISSING_SLOT)
  t.known.read = nullptr;
#endif
  return t;
}();

#if defined(VARIANT_BARE_DEVICE) || defined(VARIANT_HALF_DEVICE)
const strata_device_api device = [] {
  strata_device_api t{};
  t.struct_size = sizeof t;
  t.open = kFill;
  t.close = kFill;
  t.caps = kFill;
  t.alloc = kFill;
  t.free = kFill;
  t.copy = kFill;
  t.fill = kFill;
  t.cast = kFill;
  t.accumulate = kFill;
  t.square_sums = kFill;
  t.find_nonfinite = kFill;
#if defined(VARIANT_HALF_DEVICE)
  t.stream_create = kFill;
#endif
  return t;
}();
#endif

#if !defined(VARIANT_NULL_GET_INTERFACE)
const void* STRATA_CALL get_interface(const char* id) {
  const std::string_view name = id;
  if (name == STRATA_OFFLOAD) return &offload;
  if (name == "org.acme.other/1") return VARIANT_ID;
#if defined(VARIANT_BARE_DEVICE) || defined(VARIANT_HALF_DEVICE)
  if (name == STRATA_DEVICE) return &device;
#endif
  return nullptr;
}
#endif

const strata_plugin descriptor = [] {
  strata_plugin p{};
  p.struct_size = sizeof p;
  p.id = VARIANT_ID;
  p.version = "1.2.3";
#if !defined(VARIANT_NULL_GET_INTERFACE)
  p.get_interface = get_interface;
#endif
#if defined(VARIANT_NEWER_MINOR)
  p.abi_minor = 99;
#elif defined(VARIANT_SHORT_DESCRIPTOR)
  p.struct_size = 16;
#elif defined(VARIANT_OTHER_ID)
  p.id = "somebody_else";
#elif defined(VARIANT_GARBLED_ID)
  p.id = "\x1b[2J\x07";
#elif defined(VARIANT_OTHER_VERSION)
  p.version = "9.9.9";
#endif
  return p;
}();

}  // namespace

#if defined(VARIANT_UNDEFINED_SYMBOL)
extern "C" int nobody_defines_this();
#endif

#if defined(VARIANT_NO_ENTRY)
extern "C" STRATA_EXPORT const strata_plugin* some_other_entry(uint32_t) { return &descriptor; }
#elif defined(VARIANT_DATA_ENTRY)
extern const void* data_entry __asm__("strata_plugin_entry_v1");
STRATA_EXPORT const void* data_entry = &descriptor;
#else
extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) {
#if defined(VARIANT_NULL_ENTRY)
  (void)descriptor;
  return nullptr;
#elif defined(VARIANT_THROWING_ENTRY)
  (void)descriptor;
  throw std::runtime_error("thrown by the entry");
#elif defined(VARIANT_UNDEFINED_SYMBOL)
  return nobody_defines_this() ? nullptr : &descriptor;
#else
  return &descriptor;
#endif
}
#endif
