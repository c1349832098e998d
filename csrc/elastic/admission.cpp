#include "elastic/admission.h"

#include <algorithm>

#include "membership/records.h"

namespace torchft_ext {
namespace {

// Empty: its record names no address that others reach.
std::string hostOf(const Member& member) {
  const auto record = decodeRecord(member.record);
  if (!record) return {};
  for (const SocketAddress& address : record->addresses) {
    if (!address.isLocal()) return address.ip();
  }
  return {};
}

}  // namespace

std::optional<Admission::HostPair> Admission::twoHosts(const Member& one, const Member& other) {
  HostPair hosts = std::minmax(hostOf(one), hostOf(other));
  if (hosts.first.empty() || hosts.first == hosts.second) return std::nullopt;
  return hosts;
}

std::string Admission::couldNotConnect(const Member& one, const Member& other,
                                       Clock::time_point now) {
  const auto hosts = twoHosts(one, other);
  return hosts ? keepApart(*hosts, now) : std::string();
}

std::string Admission::hasBroken(const Member& one, const Member& other, Clock::time_point now) {
  const auto hosts = twoHosts(one, other);
  if (!hosts) return {};
  std::erase_if(broke_at_, [&](const auto& known) { return known.second + backoff_ <= now; });
  const auto [known, first] = broke_at_.try_emplace(*hosts, now);
  if (first || now - known->second < kOneBreak) return {};
  known->second = now;
  return keepApart(*hosts, now);
}

std::string Admission::keepApart(const HostPair& hosts, Clock::time_point now) {
  const auto [known, fresh] = until_.try_emplace(hosts);
  const bool again = fresh || known->second <= now;
  known->second = now + backoff_;
  return again ? hosts.first + " and " + hosts.second : std::string();
}

bool Admission::haveMet(const MemberId& newcomer, const MemberId& other) const {
  const auto one = reached_.find(newcomer);
  const auto two = reached_.find(other);
  return (one != reached_.end() && one->second.contains(other)) ||
         (two != reached_.end() && two->second.contains(newcomer));
}

std::set<MemberId> Admission::heldBack(const std::vector<Member>& members,
                                       const std::vector<Member>& newcomers,
                                       Clock::time_point now) {
  std::erase_if(until_, [&](const auto& pair) { return pair.second <= now; });
  std::erase_if(reached_, [&](const auto& one) {
    return std::none_of(newcomers.begin(), newcomers.end(),
                        [&](const Member& newcomer) { return newcomer.id == one.first; });
  });
  std::set<MemberId> held;
  std::vector<Member> together = members;
  for (const Member& newcomer : newcomers) {
    const bool may_come = std::all_of(together.begin(), together.end(), [&](const Member& other) {
      return haveMet(newcomer.id, other.id) &&
             (until_.empty() || !until_.contains(std::minmax(hostOf(newcomer), hostOf(other))));
    });
    if (may_come) {
      together.push_back(newcomer);
    } else {
      held.insert(newcomer.id);
    }
  }
  return held;
}

}  // namespace torchft_ext
