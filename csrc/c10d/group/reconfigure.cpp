#include "c10d/group/reconfigure.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>

namespace torchft_ext {
namespace {

constexpr std::string_view kStart = "ft:";
constexpr char kStore = '@';  // in no host's name

struct Parts {
  std::string host;
  std::string store;
};

// nullopt: no handle of ours.
std::optional<Parts> partsOf(const std::string& handle) {
  const size_t at = handle.find(kStore);
  if (!handle.starts_with(kStart) || at == std::string::npos) return std::nullopt;
  const size_t serial = handle.find(':', kStart.size());
  const size_t host = serial < at ? handle.find(':', serial + 1) : at;
  const size_t pid = handle.rfind(':', at);
  const size_t slash = handle.find('/', at);
  if (host >= pid || pid > at || slash == std::string::npos) return std::nullopt;
  return Parts{handle.substr(host + 1, pid - host - 1), handle.substr(at + 1)};
}

bool isOfOneHost(const std::string& host) {
  return host.empty() || host == "localhost" || host.starts_with("127.") || host == "0.0.0.0" ||
         host == "::" || host == "::1";
}

std::string toString(const StoreAddress& store) {
  const bool v6 = store.host.find(':') != std::string::npos;
  return (v6 ? "[" + store.host + "]" : store.host) + ":" + std::to_string(store.port) + "/" +
         store.prefix;
}

std::string digestOf(const std::vector<std::string>& handles) {
  std::string all;
  for (const std::string& handle : handles) all += handle + '\n';
  return c10::sha1(all).str();
}

}  // namespace

std::string makeHandle(const MemberRecord& self, uint64_t serial, const StoreAddress& store) {
  return std::string(kStart) + self.incarnation.hex() + ":" + std::to_string(serial) + ":" +
         self.host + ":" + std::to_string(self.pid) + kStore + toString(store);
}

StoreAddress seenByOthers(StoreAddress store, const MemberRecord& self) {
  if (isOfOneHost(store.host) && !self.addresses.empty()) store.host = self.addresses.back().ip();
  return store;
}

HandledMembership membershipOf(const std::vector<std::string>& handles, const std::string& own,
                               int64_t uuid) {
  TORCH_CHECK_VALUE(!handles.empty(), "reconfigure: handles: expected at least one, found none");
  std::set<std::string> seen;
  for (const std::string& handle : handles) {
    TORCH_CHECK_VALUE(partsOf(handle),
                      "reconfigure: handles: expected what get_reconfigure_handle() of this "
                      "backend gives, found '",
                      handle, "'");
    TORCH_CHECK_VALUE(seen.insert(handle).second,
                      "reconfigure: handles: expected each one once, found '", handle, "' twice");
  }
  const auto place = std::find(handles.begin(), handles.end(), own);
  TORCH_CHECK_VALUE(place != handles.end(), "reconfigure: handles: expected this group's own, '",
                    own, "', among them; found ", handles.size(), " others");
  const Parts first = partsOf(handles.front()).value();
  const Parts mine = partsOf(own).value();
  HandledMembership membership;
  membership.rank = static_cast<int>(place - handles.begin());
  membership.size = static_cast<int>(handles.size());
  const std::string prefix = "reconfigure/" + std::to_string(uuid) + "/" + digestOf(handles);
  membership.store = parseStoreAddress(
      "reconfigure: handles", first.store + (first.store.ends_with('/') ? "" : "/") + prefix);
  membership.own_store = first.store == mine.store;
  TORCH_CHECK_VALUE(
      !isOfOneHost(membership.store.host) || first.host == mine.host,
      "reconfigure: handles: expected a store that all members can reach at the first "
      "one's, found ",
      first.store, " on host ", first.host, "; this is host ", mine.host,
      ": make that group over a TCPStore at the host's name or address");
  return membership;
}

}  // namespace torchft_ext
