# shellcheck shell=bash disable=SC2034
# packages.sh - what Strata needs from the distribution, in one place; sourced by ./check and ./quickstart.
#
# The names are the same on Debian 12 and Ubuntu 24.04 (on Ubuntu most of them are in "universe"). install_packages asks
# dpkg first and does not touch apt when everything is there.

BUILD_PACKAGES=(g++ cmake ninja-build pkg-config libboost-dev libtomlplusplus-dev libspdlog-dev libgtest-dev libgmock-dev
  libbenchmark-dev libhdf5-dev liburing-dev libnuma-dev libopenmpi-dev openmpi-bin libcli11-dev nlohmann-json3-dev
  libxxhash-dev libopenblas-dev python3)
SAMPLE_PACKAGES=(bible-kjv)
TEST_PACKAGES=(clang clang-format-14 hdf5-tools python3-pytest python3-numpy python3-h5py)

# Those of the given packages that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || printf '%s ' "$package"
  done
}

# install_packages NAME...: installs what is missing, as root or through sudo.
install_packages() {
  local missing as_root=""
  if ! command -v dpkg-query >/dev/null; then
    echo "This is neither Debian nor Ubuntu. Install these, or what they are called here, and pass --no-install: $*"
    return 1
  fi
  missing=$(missing_packages "$@")
  if [ -z "$missing" ]; then
    echo "all packages are installed"
    return 0
  fi
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "run as root, or install sudo, to install: $missing"; return 1; }
    as_root="sudo"
  fi
  echo "installing: $missing"
  # shellcheck disable=SC2086
  $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
}
