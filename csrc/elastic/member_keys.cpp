#include "elastic/member_keys.h"

#include <algorithm>
#include <iterator>

#include "elastic/elastic_codec.h"

namespace torchft_ext {
namespace {

void write(ByteWriter& writer, const ViewName& view) {
  writer.raw(view.lineage.bytes);
  writer.u64(view.number);
}

ViewName readViewName(ByteReader& reader) {
  ViewName view;
  reader.raw(view.lineage.bytes);
  view.number = reader.u64();
  return view;
}

void write(ByteWriter& writer, const ConnectionProof& proof) {
  writer.raw(proof.by_job);
  writer.raw(proof.by_view);
}

ConnectionProof readProof(ByteReader& reader) {
  ConnectionProof proof;
  reader.raw(proof.by_job);
  reader.raw(proof.by_view);
  return proof;
}

template <typename Tag>
Digest256 digestBy(const Identity<Tag>& secret, ConnectionEnd end,
                   const ProvedConnection& connection) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(end));
  writer.raw(connection.by_acceptor.bytes);
  writer.raw(connection.by_connector.bytes);
  writer.raw(connection.acceptor.bytes);
  writer.raw(connection.connector.bytes);
  write(writer, connection.view);
  return hmacSha256({reinterpret_cast<const char*>(secret.bytes.data()), secret.bytes.size()},
                    writer.take());
}

const Member* find(const View& view, const MemberId& id) {
  const int rank = view.rankOf(id);
  return rank < 0 ? nullptr : &view.members[static_cast<size_t>(rank)];
}

}  // namespace

std::string encodeQuestion(const ConnectionQuestion& question) {
  ByteWriter writer;
  writer.raw(question.challenge.bytes);
  write(writer, question.newest);
  return writer.take();
}

std::optional<ConnectionQuestion> decodeQuestion(std::string_view bytes) {
  ByteReader reader(bytes);
  ConnectionQuestion question;
  reader.raw(question.challenge.bytes);
  question.newest = readViewName(reader);
  return reader.atEnd() ? std::optional(question) : std::nullopt;
}

std::string encodeClaim(const ConnectionClaim& claim) {
  ByteWriter writer;
  write(writer, claim.member);
  writer.raw(claim.challenge.bytes);
  write(writer, claim.view);
  write(writer, claim.proof);
  return writer.take();
}

std::optional<ConnectionClaim> decodeClaim(std::string_view bytes) {
  ByteReader reader(bytes);
  ConnectionClaim claim;
  claim.member = readMember(reader);
  reader.raw(claim.challenge.bytes);
  claim.view = readViewName(reader);
  claim.proof = readProof(reader);
  return reader.atEnd() ? std::optional(std::move(claim)) : std::nullopt;
}

std::string encodeProof(const ConnectionProof& proof) {
  ByteWriter writer;
  write(writer, proof);
  return writer.take();
}

std::optional<ConnectionProof> decodeProof(std::string_view bytes) {
  ByteReader reader(bytes);
  const ConnectionProof proof = readProof(reader);
  return reader.atEnd() ? std::optional(proof) : std::nullopt;
}

void MemberKeys::enter(const View& view, const MemberId& self) {
  roster_ = view;
  roster_.outcomes.clear();
  self_ = self;
  views_[newest()] = view.secret;
  while (views_.size() > kMostViews) {
    const auto oldest = std::min_element(views_.begin(), views_.end(), [](auto& a, auto& b) {
      return a.first.number < b.first.number;
    });
    views_.erase(oldest);
  }
}

ViewName MemberKeys::newest() const {
  return {roster_.lineage, roster_.number};
}

ViewName MemberKeys::viewFor(const ViewName& theirs) const {
  const auto after = views_.upper_bound(theirs);
  if (after != views_.begin()) {
    const ViewName& found = std::prev(after)->first;
    if (found.lineage == theirs.lineage) return found;
  }
  // Whoever has to prove something here has been in the view before the newest one.
  const ViewName before{roster_.lineage, roster_.number - 1};
  return views_.contains(before) ? before : newest();
}

ConnectionProof MemberKeys::prove(ConnectionEnd own, const ProvedConnection& connection) const {
  ConnectionProof proof;
  proof.by_job = digestBy(job_, own, connection);
  const auto known = views_.find(connection.view);
  if (known != views_.end()) proof.by_view = digestBy(known->second, own, connection);
  return proof;
}

std::optional<ViewName> MemberKeys::provedBy(ConnectionEnd its_end,
                                             const ProvedConnection& connection,
                                             const ConnectionProof& proof) const {
  if (!equalInConstantTime(digestBy(job_, its_end, connection), proof.by_job)) return std::nullopt;
  const auto known = views_.find(connection.view);
  const bool by_view =
      known != views_.end() &&
      equalInConstantTime(digestBy(known->second, its_end, connection), proof.by_view);
  const bool connects = its_end == ConnectionEnd::kConnector;
  if (hasToProveView(connects ? connection.connector : connection.acceptor) &&
      !(by_view && isRecent(connection.view))) {
    return std::nullopt;
  }
  return by_view ? connection.view : ViewName{};
}

// Whoever has proved a view of this lineage after the first was a member of it; that member too, if
// it was in the job by then. What it proved when it came counts for as long as the connection
// stands, however old that view is by now.
bool MemberKeys::stillHolds(const MemberId& id, const ViewName& proved_by) const {
  constexpr uint64_t kKnownToNewcomers = 1;  // it stands in the founding
  if (roster_.number <= kKnownToNewcomers + 1 || !hasToProveView(id)) return true;
  return proved_by.lineage == roster_.lineage && proved_by.number > kKnownToNewcomers &&
         proved_by.number >= find(roster_, id)->since;
}

// Both were members of the view before, so each knows that one or a later one.
bool MemberKeys::hasToProveView(const MemberId& id) const {
  const Member* member = find(roster_, id);
  const Member* own = find(roster_, self_);
  return member != nullptr && own != nullptr && member->since < roster_.number &&
         own->since < roster_.number;
}

// Secrets of older views are known to others too: who has been left out, and, of the first one, who
// has read the founding.
bool MemberKeys::isRecent(const ViewName& view) const {
  return view.lineage == roster_.lineage && view.number + 1 >= roster_.number;
}

bool MemberKeys::contradictsRoster(const Member& member) const {
  const Member* known = find(roster_, member.id);
  return known != nullptr && known->record != member.record;
}

}  // namespace torchft_ext
