// gates.h - what a test does with calls that the fault plugin holds: its controls, and waiting without a clock.
#pragma once

#include <gtest/gtest.h>

#include <chrono>

#include "strata/draft/fault_control.h"
#include "strata/strata.h"
#include "tests/support/waiting.h"

namespace strata::test {

// Of the fault plugin that has this role.
inline const strata_fault_control_api* control(strata_engine* e, const char* role) {
  const void* table = nullptr;
  EXPECT_EQ(strata_get_plugin_interface(e, role, STRATA_FAULT_CONTROL, &table), STRATA_OK) << strata_last_error();
  return static_cast<const strata_fault_control_api*>(table);
}

// False after five seconds.
template <class Condition>
bool eventually(Condition condition) {
  return eventually(condition, std::chrono::seconds(5));
}

}  // namespace strata::test
