#include "elastic/elastic_codec.h"

#include <algorithm>

namespace torchft_ext {

// Found by the templates below where they are used: by their arguments, in this namespace.
static void write(ByteWriter& writer, const Vote& vote);
static void write(ByteWriter& writer, const Answer& answer);
static void write(ByteWriter& writer, const Outcome& outcome);
static void write(ByteWriter& writer, const Ballot& ballot);
static void write(ByteWriter& writer, const MemberPair& pair);
static void write(ByteWriter& writer, const AgreementReport& report);
static void write(ByteWriter& writer, const Promise& promise);

template <typename Tag>
static void write(ByteWriter& writer, const Identity<Tag>& id) {
  writer.raw(id.bytes);
}

template <typename Id>
static Id readId(ByteReader& reader) {
  Id id;
  reader.raw(id.bytes);
  return id;
}

template <typename T>
static void writeAll(ByteWriter& writer, const std::vector<T>& values) {
  writer.u32(static_cast<uint32_t>(values.size()));
  for (const T& value : values) write(writer, value);
}

// Stops at the first that is not whole: a count alone makes no memory.
template <typename ReadOne>
static auto readAll(ByteReader& reader, size_t most, const ReadOne& readOne) {
  std::vector<decltype(readOne(reader))> values;
  const uint32_t count = reader.u32();
  if (count > most) {
    reader.fail();
    return values;
  }
  for (uint32_t i = 0; i < count && reader.ok(); ++i) values.push_back(readOne(reader));
  return values;
}

void write(ByteWriter& writer, const Member& member) {
  write(writer, member.id);
  writer.u64(member.since);
  writer.text(member.record);
}
Member readMember(ByteReader& reader) {
  Member member;
  member.id = readId<MemberId>(reader);
  member.since = reader.u64();
  member.record = reader.text(kLongestRecord);
  return member;
}

static std::vector<MemberId> readIds(ByteReader& reader) {
  return readAll(reader, kMostMembers, readId<MemberId>);
}

static void write(ByteWriter& writer, const std::set<MemberId>& ids) {
  writer.u32(static_cast<uint32_t>(ids.size()));
  for (const MemberId& id : ids) write(writer, id);
}
static std::set<MemberId> readIdSet(ByteReader& reader) {
  const std::vector<MemberId> ids = readIds(reader);
  return {ids.begin(), ids.end()};
}

static void write(ByteWriter& writer, const MemberPair& pair) {
  write(writer, pair.first);
  write(writer, pair.second);
}
static MemberPair readPair(ByteReader& reader) {
  const MemberId first = readId<MemberId>(reader);
  return {first, readId<MemberId>(reader)};
}

static void write(ByteWriter& writer, const std::set<MemberPair>& pairs) {
  writer.u32(static_cast<uint32_t>(pairs.size()));
  for (const MemberPair& pair : pairs) write(writer, pair);
}
static std::set<MemberPair> readPairs(ByteReader& reader) {
  constexpr size_t kMostPairs = 64;  // members tell of a few
  const std::vector<MemberPair> pairs = readAll(reader, kMostPairs, readPair);
  for (const auto& [one, other] : pairs) {
    if (!(one < other)) reader.fail();
  }
  return {pairs.begin(), pairs.end()};
}

static void write(ByteWriter& writer, const VoteDigest& digest) {
  writer.text(digest.common);
  writer.u32(digest.shard);
  writer.text(digest.of_shard);
}
static VoteDigest readDigest(ByteReader& reader) {
  VoteDigest digest;
  digest.common = reader.text(kLongestDigest);
  digest.shard = reader.u32();
  digest.of_shard = reader.text(kLongestDigest);
  return digest;
}

static void write(ByteWriter& writer, const Vote& vote) {
  const bool has_digest = !vote.digest.isEmpty();
  const bool holds_back = !vote.held_back.empty();
  writer.u8(static_cast<uint8_t>((vote.ok ? 1 : 0) | (vote.leaving ? 2 : 0) |
                                 (vote.new_witness ? 4 : 0) | (has_digest ? 8 : 0) |
                                 (vote.last ? 16 : 0) | (holds_back ? 32 : 0)));
  writer.text(vote.note);
  writeAll(writer, vote.waiting);
  if (holds_back) writeAll(writer, vote.held_back);
  if (has_digest) write(writer, vote.digest);
}
static Vote readVote(ByteReader& reader) {
  Vote vote;
  const uint8_t flags = reader.u8();
  vote.ok = (flags & 1) != 0;
  vote.leaving = (flags & 2) != 0;
  vote.new_witness = (flags & 4) != 0;
  vote.last = (flags & 16) != 0;
  vote.note = reader.text(kLongestNote);
  vote.waiting = readIds(reader);
  if ((flags & 32) != 0) vote.held_back = readIds(reader);
  if ((flags & 8) != 0) vote.digest = readDigest(reader);
  return vote;
}

static void write(ByteWriter& writer, const std::map<MemberId, Vote>& votes) {
  writer.u32(static_cast<uint32_t>(votes.size()));
  for (const auto& [member, vote] : votes) {
    write(writer, member);
    write(writer, vote);
  }
}
static std::map<MemberId, Vote> readVotes(ByteReader& reader) {
  const auto votes = readAll(reader, kMostMembers, [](ByteReader& from) {
    const MemberId member = readId<MemberId>(from);
    return std::pair(member, readVote(from));
  });
  return {votes.begin(), votes.end()};
}

using Note = std::pair<MemberId, std::string>;
static void write(ByteWriter& writer, const Answer& answer) {
  writer.u8(static_cast<uint8_t>((answer.ok ? 1 : 0) | (answer.new_witness ? 2 : 0) |
                                 (answer.diverged ? 4 : 0) | (answer.last ? 8 : 0)));
  writer.u32(static_cast<uint32_t>(answer.notes.size()));
  for (const auto& [member, note] : answer.notes) {
    write(writer, member);
    writer.text(note);
  }
  writeAll(writer, answer.waiting);
  writeAll(writer, answer.leaving);
}
static Answer readAnswer(ByteReader& reader) {
  Answer answer;
  const uint8_t flags = reader.u8();
  answer.ok = (flags & 1) != 0;
  answer.new_witness = (flags & 2) != 0;
  answer.diverged = (flags & 4) != 0;
  answer.last = (flags & 8) != 0;
  const auto notes = readAll(reader, kMostMembers, [](ByteReader& from) {
    const MemberId member = readId<MemberId>(from);
    return Note(member, from.text(kLongestNote));
  });
  answer.notes.insert(notes.begin(), notes.end());
  answer.waiting = readIds(reader);
  answer.leaving = readIds(reader);
  return answer;
}

static void write(ByteWriter& writer, const Outcome& outcome) {
  writer.u64(outcome.view);
  writer.u64(outcome.index);
  write(writer, outcome.answer);
}
static Outcome readOutcome(ByteReader& reader) {
  Outcome outcome;
  outcome.view = reader.u64();
  outcome.index = reader.u64();
  outcome.answer = readAnswer(reader);
  return outcome;
}

static void write(ByteWriter& writer, const Ballot& ballot) {
  writer.u32(ballot.round);
  write(writer, ballot.proposer);
}
static Ballot readBallot(ByteReader& reader) {
  Ballot ballot;
  ballot.round = reader.u32();
  ballot.proposer = readId<MemberId>(reader);
  return ballot;
}

template <typename T>
static void writeIfAny(ByteWriter& writer, const std::optional<T>& value) {
  writer.u8(value ? 1 : 0);
  if (value) write(writer, *value);
}
template <typename ReadOne>
static auto readIfAny(ByteReader& reader, const ReadOne& readOne) {
  std::optional<decltype(readOne(reader))> value;
  if (reader.u8() != 0) value = readOne(reader);
  return value;
}

static void write(ByteWriter& writer, const AgreementReport& report) {
  writer.u64(report.index);
  writer.u8(report.returned ? 1 : 0);
  writeIfAny(writer, report.vote);
  writeIfAny(writer, report.answer);
}
static AgreementReport readReport(ByteReader& reader) {
  AgreementReport report;
  report.index = reader.u64();
  report.returned = reader.u8() != 0;
  report.vote = readIfAny(reader, readVote);
  report.answer = readIfAny(reader, readAnswer);
  return report;
}

static void write(ByteWriter& writer, const Promise& promise) {
  writer.u8(static_cast<uint8_t>(promise.promotion));
  const bool holds_back = !promise.held_back.empty();
  writer.u8(static_cast<uint8_t>((promise.ready ? 1 : 0) | (promise.leaving ? 2 : 0) |
                                 (holds_back ? 4 : 0)));
  writeIfAny(writer, promise.accepted);
  writeAll(writer, promise.agreements);
  writeAll(writer, promise.waiting);
  if (holds_back) writeAll(writer, promise.held_back);
  writeAll(writer, promise.cut);
  writeAll(writer, promise.absent);
  writer.u8(promise.shard ? 1 : 0);
  if (promise.shard) writer.u32(*promise.shard);
  write(writer, promise.witness);
}
static Promise readPromise(ByteReader& reader) {
  Promise promise;
  const uint8_t promotion = reader.u8();
  if (promotion > static_cast<uint8_t>(Promotion::kYes)) reader.fail();
  if (promotion == static_cast<uint8_t>(Promotion::kMaybe)) promise.promotion = Promotion::kMaybe;
  if (promotion == static_cast<uint8_t>(Promotion::kYes)) promise.promotion = Promotion::kYes;
  const uint8_t flags = reader.u8();
  promise.ready = (flags & 1) != 0;
  promise.leaving = (flags & 2) != 0;
  promise.accepted = readIfAny(reader, readAccepted);
  promise.agreements = readAll(reader, 3, readReport);
  promise.waiting = readAll(reader, kMostMembers, readMember);
  if ((flags & 4) != 0) promise.held_back = readIds(reader);
  promise.cut = readAll(reader, kMostMembers, readPair);
  promise.absent = readIds(reader);
  promise.shard = readIfAny(reader, [](ByteReader& from) { return from.u32(); });
  promise.witness = readId<WitnessId>(reader);
  return promise;
}

static bool isKind(uint8_t kind) {
  return kind >= static_cast<uint8_t>(ElasticKind::kVote) &&
         kind <= static_cast<uint8_t>(ElasticKind::kProbed);
}

void write(ByteWriter& writer, const View& view) {
  write(writer, view.lineage);
  writer.u64(view.number);
  writeAll(writer, view.members);
  writeAll(writer, view.voters);
  write(writer, view.witness);
  write(writer, view.secret);
  write(writer, view.secret_digest);
  write(writer, view.seal);
  writeAll(writer, view.outcomes);
  writer.u32(static_cast<uint32_t>(view.old_size));
  writeAll(writer, view.decided_by);
  writer.u8(view.store_decided ? 1 : 0);
}

View readView(ByteReader& reader) {
  View view;
  view.lineage = readId<Lineage>(reader);
  view.number = reader.u64();
  view.members = readAll(reader, kMostMembers, readMember);
  view.voters = readIds(reader);
  view.witness = readId<WitnessId>(reader);
  view.secret = readId<ViewSecret>(reader);
  view.secret_digest = readId<SecretDigest>(reader);
  view.seal = readId<ViewSeal>(reader);
  view.outcomes = readAll(reader, kMostOutcomes, readOutcome);
  view.old_size = static_cast<int>(std::min<uint32_t>(reader.u32(), kMostMembers));
  view.decided_by = readIds(reader);
  view.store_decided = reader.u8() != 0;
  return view;
}

void write(ByteWriter& writer, const AcceptedView& accepted) {
  write(writer, accepted.ballot);
  write(writer, accepted.view);
}

AcceptedView readAccepted(ByteReader& reader) {
  AcceptedView accepted;
  accepted.ballot = readBallot(reader);
  accepted.view = readView(reader);
  return accepted;
}

std::string encodeElasticMessage(const ElasticMessage& message) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(message.kind));
  write(writer, message.lineage);
  writer.u64(message.number);
  write(writer, message.ballot);
  writer.u64(message.index);
  switch (message.kind) {
    case ElasticKind::kVote:
      write(writer, message.votes);
      write(writer, message.cut);
      break;
    case ElasticKind::kCompleted:
      write(writer, message.completed);
      write(writer, message.cut);
      break;
    case ElasticKind::kPromise:
      write(writer, message.promise);
      break;
    case ElasticKind::kAccept:
    case ElasticKind::kView:
      writeIfAny(writer, message.view);
      break;
    case ElasticKind::kJoin:
      writeAll(writer, message.members);
      write(writer, message.reached);
      break;
    case ElasticKind::kProbed:
      writeAll(writer, message.members);
      writer.text(message.padding);
      break;
    case ElasticKind::kProbe:
      writer.text(message.padding);
      break;
    default:
      break;
  }
  return writer.take();
}

std::optional<ElasticMessage> decodeElasticMessage(std::string_view bytes) {
  ByteReader reader(bytes);
  ElasticMessage message;
  const uint8_t kind = reader.u8();
  if (!isKind(kind)) return std::nullopt;
  message.kind = static_cast<ElasticKind>(kind);
  message.lineage = readId<Lineage>(reader);
  message.number = reader.u64();
  message.ballot = readBallot(reader);
  message.index = reader.u64();
  switch (message.kind) {
    case ElasticKind::kVote:
      message.votes = readVotes(reader);
      message.cut = readPairs(reader);
      break;
    case ElasticKind::kCompleted:
      message.completed = readIdSet(reader);
      message.cut = readPairs(reader);
      break;
    case ElasticKind::kPromise:
      message.promise = readPromise(reader);
      break;
    case ElasticKind::kAccept:
    case ElasticKind::kView:
      message.view = readIfAny(reader, readView);
      if (!message.view) return std::nullopt;
      break;
    case ElasticKind::kJoin:
      message.members = readAll(reader, 1, readMember);
      if (message.members.empty()) return std::nullopt;
      message.reached = readIdSet(reader);
      break;
    case ElasticKind::kProbed:
      message.members = readAll(reader, kMostMembers, readMember);
      message.padding = reader.text(kProbeBytes);
      break;
    case ElasticKind::kProbe:
      message.padding = reader.text(kProbeBytes);
      break;
    default:
      break;
  }
  if (!reader.atEnd()) return std::nullopt;
  return message;
}

}  // namespace torchft_ext
