#include "elastic/view_check.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include "base/hmac.h"

namespace torchft_ext {
namespace {

template <typename T, typename IdOf>
bool areDistinct(const std::vector<T>& values, const IdOf& idOf) {
  std::set<MemberId> seen;
  return std::all_of(values.begin(), values.end(), [&](const T& value) {
    return !idOf(value).isZero() && seen.insert(idOf(value)).second;
  });
}

bool areDistinct(const std::vector<MemberId>& ids) {
  return areDistinct(ids, [](const MemberId& id) { return id; });
}

bool areMembers(const std::vector<MemberId>& ids, const View& view) {
  return std::all_of(ids.begin(), ids.end(), [&](const MemberId& id) { return view.has(id); });
}

// Of the agreements of the view before, in their order.
bool areOutcomes(const View& view) {
  uint64_t last = 0;
  for (const Outcome& outcome : view.outcomes) {
    if (outcome.view + 1 != view.number || outcome.index <= last) return false;
    last = outcome.index;
  }
  return true;
}

// A newcomer of the known view that has not heard of it in time may ask again, and come into a
// later one under its id.
bool mayHaveComeAgain(const Member& member, const View& view, const View& known, int before) {
  const Member& then = known.members[static_cast<size_t>(before)];
  return then.since == known.number && then.record == member.record &&
         view.number > known.number + 1;
}

// Who was a member before stands there as before, and in the same order; the others came since.
bool continuesRoster(const View& view, const View& known) {
  int last = -1;
  for (const Member& member : view.members) {
    const int before = known.rankOf(member.id);
    if (member.since > known.number) {
      if (before >= 0 && !mayHaveComeAgain(member, view, known, before)) return false;
      continue;
    }
    if (before <= last || known.members[static_cast<size_t>(before)] != member) return false;
    last = before;
  }
  return true;
}

std::string objectionToNext(const View& view, const View& known) {
  const bool handed_over = view.voters.size() == view.members.size();  // all voters may leave
  if (!areMembers(view.voters, known) && !handed_over) return "a newcomer votes";
  if (!areMembers(view.decided_by, known)) return "a stranger decided on it";
  if (view.old_size != static_cast<int>(known.members.size())) return "another view was before it";
  if (!known.secret.isZero() &&
      !equalInConstantTime(sealOf(view, known.secret).bytes, view.seal.bytes)) {
    return "no member of the view before has sealed it";
  }
  return {};
}

// Whoever came with `known` had to prove no view's secret, so anybody of the job may have come
// under its id. In the first view there is nobody else.
bool mayTellOfLater(const View& known, const MemberId& teller) {
  const int rank = known.rankOf(teller);
  if (rank < 0) return false;
  return known.number == 1 || known.members[static_cast<size_t>(rank)].since < known.number;
}

// Secrets are random, so a hash does not give them away.
SecretDigest digestOf(const ViewSecret& secret) {
  SecretDigest digest;
  if (secret.isZero()) return digest;
  const auto* bytes = reinterpret_cast<const char*>(secret.bytes.data());
  const Digest256 whole = sha256(std::string_view(bytes, secret.bytes.size()));
  std::copy_n(whole.begin(), digest.bytes.size(), digest.bytes.begin());
  return digest;
}

}  // namespace

void setSecret(View& view, const ViewSecret& secret) {
  view.secret = secret;
  view.secret_digest = digestOf(secret);
}

bool isSecretOf(const ViewSecret& secret, const View& view) {
  return !secret.isZero() && digestOf(secret) == view.secret_digest;
}

ViewSeal sealOf(const View& view, const ViewSecret& secret_before) {
  View sealed = view;
  sealed.secret = {};
  sealed.seal = {};
  const auto* bytes = reinterpret_cast<const char*>(secret_before.bytes.data());
  const Digest256 digest =
      hmacSha256(std::string_view(bytes, secret_before.bytes.size()), encodeView(sealed));
  ViewSeal seal;
  std::copy_n(digest.begin(), seal.bytes.size(), seal.bytes.begin());
  return seal;
}

std::string objectionTo(const View& view) {
  if (view.number == 0 || view.lineage.isZero()) return "it is of no job";
  if (!areDistinct(view.members, [](const Member& member) { return member.id; })) {
    return "it has a member twice";
  }
  const bool all_came = std::all_of(view.members.begin(), view.members.end(), [&](const auto& one) {
    return one.since > 0 && one.since <= view.number;
  });
  if (!all_came) return "it has a member from later";
  const bool decidable = view.voters.empty() == view.members.empty();  // all may leave at once
  if (!decidable || !areDistinct(view.voters) || !areMembers(view.voters, view)) {
    return "its voters are not of its members";
  }
  if (!areDistinct(view.decided_by)) return "somebody decided on it twice";
  if (!areOutcomes(view)) return "its outcomes are of other agreements";
  if (!view.secret.isZero() && !isSecretOf(view.secret, view)) return "its secret is another one";
  return {};
}

std::string objectionToSuccessor(const View& view, const View& known, const MemberId& teller) {
  if (std::string found = objectionTo(view); !found.empty()) return found;
  if (view.number <= known.number) return "it is no later one";
  if (!continuesRoster(view, known)) return "its members are not those of the views before";
  if (view.number == known.number + 1) return objectionToNext(view, known);
  return mayTellOfLater(known, teller) ? "" : "a stranger tells of it";
}

std::string objectionToTold(const View& view, const View* known, const MemberId& teller,
                            bool needs_secret) {
  std::string found =
      known != nullptr ? objectionToSuccessor(view, *known, teller) : objectionTo(view);
  // By a secret of nothing anybody could seal what comes after it.
  const bool has_one = known != nullptr ? !known->secret.isZero() : !view.secret_digest.isZero();
  if (found.empty() && needs_secret && has_one && view.secret.isZero()) {
    found = "it comes without its members' secret";
  }
  return found.empty() ? found : "view " + std::to_string(view.number) + ": " + found;
}

std::string objectionToNewcomer(const Member& newcomer, const Member& proved) {
  if (newcomer.id != proved.id) return "it asks for another one";
  if (newcomer.record != proved.record) return "it has proved to be elsewhere";
  return {};
}

}  // namespace torchft_ext
