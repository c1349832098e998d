#include "c10d/reconfigure.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <set>

namespace torchft_ext {
namespace {

constexpr const char* kStart = "ft:";

std::string digestOf(const std::vector<std::string>& handles) {
  std::string all;
  for (const std::string& handle : handles) all += handle + '\n';
  return c10::sha1(all).str();
}

}  // namespace

std::string makeHandle(const MemberRecord& self, uint64_t serial) {
  return kStart + self.incarnation.hex() + ":" + std::to_string(serial) + ":" + self.host + ":" +
         std::to_string(self.pid);
}

HandledMembership membershipOf(const std::vector<std::string>& handles, const std::string& own,
                               int64_t uuid) {
  TORCH_CHECK_VALUE(!handles.empty(), "reconfigure: handles: expected at least one, found none");
  std::set<std::string> seen;
  for (const std::string& handle : handles) {
    TORCH_CHECK_VALUE(handle.starts_with(kStart),
                      "reconfigure: handles: expected what get_reconfigure_handle() of this "
                      "backend gives, found '",
                      handle, "'");
    TORCH_CHECK_VALUE(seen.insert(handle).second,
                      "reconfigure: handles: expected each one once, found '", handle, "' twice");
  }
  const auto place = std::find(handles.begin(), handles.end(), own);
  TORCH_CHECK_VALUE(place != handles.end(), "reconfigure: handles: expected this group's own, '",
                    own, "', among them; found ", handles.size(), " others");
  return {static_cast<int>(place - handles.begin()), static_cast<int>(handles.size()),
          "reconfigure/" + std::to_string(uuid) + "/" + digestOf(handles)};
}

}  // namespace torchft_ext
