// leave_behind.h - gives up an object that something which cannot be stopped still uses: it is never freed.
//
// The last resort of a deadline (a driver call that does not return). Under AddressSanitizer the leak is declared, so
// that its report shows those that were not meant.
#pragma once

#include <memory>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

namespace strata::plugin_kit {

template <class T>
void leave_behind(std::unique_ptr<T>& object) {
  [[maybe_unused]] T* const left = object.release();
#ifdef __SANITIZE_ADDRESS__
  __lsan_ignore_object(left);
#endif
}

}  // namespace strata::plugin_kit
