// nvme_faults_fixture.h - offload_nvme linked into the test, with system calls that obey faulty_calls.h.
#pragma once

#include "faulty_calls.h"
#include "nvme_options.h"
#include "strata/plugin.h"
#include "tests/support/disk_dirs.h"

namespace strata::test {

constexpr uint64_t kMiB = 1 << 20;

class NvmeFaults : public testing::TestWithParam<std::string> {
 protected:
  NvmeFaults() { faults().clear(); }
  ~NvmeFaults() override { faults().clear(); }
  static const strata_offload_api* linked() {
    return static_cast<const strata_offload_api*>(strata_plugin_entry_v1(0)->get_interface(STRATA_OFFLOAD));
  }
  Options options(const std::string& io) {
    return Options().set("nvme_path", dir.path).set("probe_ms", 0).set("io", io).set("queue_depth", 8);
  }
  // Why there is no io_uring here; "" when there is.
  std::string no_ring() {
    const strata_status code = tier.open(options("io_uring"));
    const std::string why = code == STRATA_OK ? "" : reason(code);
    tier.close();
    tier.rank.log_lines.clear();
    return why;
  }
  size_t mentions(const std::string& text) { return strata::test::mentions(tier, text); }
  DiskDir dir;
  Tier tier{linked()};
};

}  // namespace strata::test
