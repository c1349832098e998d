// Writes valid input for every parser of parsers_fuzz.cpp: DIRECTORY/<parser>/<name>, for
// directories that exist. The same on every run.
#include <cstdint>
#include <fstream>
#include <iostream>
#include <string>

#include "elastic/elastic_message.h"
#include "elastic/member_keys.h"
#include "elastic/view_check.h"
#include "elastic/view_store.h"
#include "host/issue_report.h"
#include "liveness/notice.h"
#include "membership/records.h"
#include "net/failure_frame.h"
#include "net/frame.h"
#include "net/handshake.h"
#include "net/socket_address.h"

namespace {

using namespace torchft_ext;  // NOLINT(google-build-using-namespace): a program of its own

std::string directory;

void seed(const std::string& parser, const std::string& name, const std::string& bytes) {
  std::ofstream file(directory + "/" + parser + "/" + name, std::ios::binary);
  file << bytes;
  if (!file) throw std::runtime_error("cannot write into " + directory + "/" + parser);
}

template <typename Identity>
Identity numbered(uint8_t number) {
  Identity identity;
  identity.bytes.fill(number);
  return identity;
}

void headers() {
  for (const auto type :
       {FrameType::kHello, FrameType::kWelcome, FrameType::kRefused, FrameType::kData,
        FrameType::kAnnounce, FrameType::kClear, FrameType::kMessage, FrameType::kBarrier,
        FrameType::kFailed, FrameType::kGoodbye, FrameType::kBeat, FrameType::kNotice}) {
    const FrameBytes bytes = encodeHeader({type, 64, 3, 2, 1});
    seed("header", std::to_string(static_cast<int>(type)), {bytes.begin(), bytes.end()});
  }
}

void failures() {
  for (uint8_t kind = 1; kind <= static_cast<uint8_t>(FailureKind::kInternal); ++kind) {
    Failure failure;
    failure.kind = static_cast<FailureKind>(kind);
    failure.cause = {3, 5, "host-b", 812, "its process ended"};
    failure.group = "dp0";
    failure.generation = 5;
    failure.rank = 3;
    failure.size = 8;
    failure.op = "allreduce";
    failure.seq = 42;
    failure.elapsed = std::chrono::milliseconds(13);
    failure.limit = std::chrono::seconds(60);
    seed("failure", std::to_string(kind), encodeFailure(failure));
  }
  seed("failure", "empty", encodeFailure({}));
}

void notices() {
  for (const auto type : {Notice::Type::kFailed, Notice::Type::kLeft, Notice::Type::kAsk,
                          Notice::Type::kSeek, Notice::Type::kSeen}) {
    Notice notice;
    notice.type = type;
    notice.generation = numbered<Nonce>(1);
    if (type == Notice::Type::kFailed) {
      notice.failure.kind = FailureKind::kPeerLost;
      notice.failure.cause = {3, -1, "host-b", 812, "its process ended"};
      notice.dead = numbered<Incarnation>(2);
    } else if (type == Notice::Type::kLeft) {
      notice.rank = 3;
    } else {
      notice.sought = numbered<Incarnation>(3);
    }
    seed("notice", std::to_string(static_cast<int>(type)), encodeNotice(notice));
  }
}

void handshakes() {
  Hello hello;
  hello.nonce = numbered<Nonce>(1);
  hello.from = numbered<Incarnation>(2);
  hello.to = numbered<Incarnation>(3);
  hello.rank = 4;
  hello.channel = 1;
  seed("hello", "hello", encodeHello(hello).substr(kFrameHeaderBytes));
  Welcome welcome;
  welcome.from = numbered<Incarnation>(5);
  seed("welcome", "welcome", encodeWelcome(welcome).substr(kFrameHeaderBytes));
  for (uint8_t code = 1; code <= static_cast<uint8_t>(RefusalCode::kWrongVersion); ++code) {
    const std::string frame = encodeRefusal({static_cast<RefusalCode>(code), "a reason"});
    seed("refusal", std::to_string(code), frame.substr(kFrameHeaderBytes));
  }
}

MemberRecord member(uint8_t number) {
  MemberRecord record;
  record.incarnation = numbered<Incarnation>(number);
  record.token = numbered<Token>(number);
  record.host = "host-" + std::to_string(number);
  record.pid = 1000 + number;
  record.addresses = {*SocketAddress::parse("unix:0123456789abcdef-00"),
                      *SocketAddress::parse("10.0.0.1:7000")};
  record.liveness_addresses = {*SocketAddress::parse("[fe80::1%1]:7001"),
                               *SocketAddress::parse("[::1]:7002")};
  return record;
}

void reports() {
  IssueReport report;
  seed("issue_report", "nothing", encode(report));
  report.collectives = 1;
  report.place = 0;
  report.asked = IssueReport::Issued{OpKind::kBroadcast, 3, 1, std::chrono::seconds(2)};
  report.last = IssueReport::Issued{OpKind::kSend, 0, 2, std::chrono::seconds(1)};
  seed("issue_report", "both", encode(report));
}

void rosters() {
  seed("record", "usual", encodeRecord(member(1)));
  seed("record", "empty", encodeRecord({}));
  FailureRecord failure_record;
  failure_record.member = member(2);
  failure_record.ending.failure.kind = FailureKind::kAborted;
  failure_record.ending.failure.cause = {1, -1, "host-b", 812, "abort() was called"};
  failure_record.ending.origin = numbered<Token>(3);
  seed("failure_record", "aborted", encodeFailureRecord(failure_record));
  Roster roster;
  for (uint8_t size : {0, 1, 2, 4}) {
    while (roster.members.size() < size) roster.members.push_back(member(size));
    seed("go", std::to_string(size), encodeGo(numbered<Token>(9), roster));
  }
}

void addresses() {
  int number = 0;
  for (const char* text : {"127.0.0.1:80", "[::1]:65535", "[fe80::1%1]:7001", "0.0.0.0:0",
                           "7000-7100", "7000", "host:1", "unix:name-1"}) {
    seed("address", std::to_string(++number), text);
  }
}

// As parsers_fuzz.cpp has it, one view later.
View elasticView() {
  View view;
  view.lineage = numbered<Lineage>(1);
  view.number = 4;
  setSecret(view, numbered<ViewSecret>(3));
  view.members = {{numbered<MemberId>(1), 1, {}}, {numbered<MemberId>(2), 1, {}}};
  view.voters = idsOf(view.members);
  view.decided_by = view.voters;
  view.old_size = 3;
  Outcome outcome;
  outcome.view = 3;
  outcome.index = 1;
  outcome.answer.ok = true;
  outcome.answer.notes[numbered<MemberId>(2)] = "note";
  view.outcomes = {outcome};
  outcome.index = 2;
  outcome.answer = {};
  outcome.answer.diverged = true;
  view.outcomes.push_back(outcome);
  view.seal = sealOf(view, numbered<ViewSecret>(9));  // not the one of the view before
  return view;
}

void elasticMessages() {
  for (uint8_t kind = 1; kind <= static_cast<uint8_t>(ElasticKind::kParted); ++kind) {
    ElasticMessage message;
    message.kind = static_cast<ElasticKind>(kind);
    message.lineage = numbered<Lineage>(1);
    message.number = message.kind == ElasticKind::kView ? 4 : 3;
    message.ballot = {1, numbered<MemberId>(2)};
    message.index = 1;
    Vote vote;
    vote.ok = true;
    vote.note = "note";
    vote.digest = {"0123456789abcdef", 1, "fedcba9876543210"};
    vote.held_back = {numbered<MemberId>(9)};
    message.votes[numbered<MemberId>(2)] = vote;
    message.completed = {numbered<MemberId>(2), numbered<MemberId>(3)};
    message.cut = {{numbered<MemberId>(1), numbered<MemberId>(2)}};
    message.promise.accepted = AcceptedView{message.ballot, elasticView()};
    message.promise.agreements = {{1, vote, std::nullopt, false}};
    message.promise.waiting = {{numbered<MemberId>(9), 0, "record"}};
    message.promise.held_back = {numbered<MemberId>(9)};
    message.view = elasticView();
    message.members = {{numbered<MemberId>(9), 0, "record"}};
    seed("elastic_message", std::to_string(kind), encodeElasticMessage(message));
  }
}

void elasticCalls() {
  for (uint8_t what = 1; what <= static_cast<uint8_t>(StoreCall::What::kAppend); ++what) {
    StoreCall call;
    call.what = static_cast<StoreCall::What>(what);
    call.view = 3;
    call.keys = {"a", "b"};
    call.value = "12";
    call.amount = -1;
    seed("store_call", std::to_string(what), encodeStoreCall(call));
  }
  seed("store_call", "answer", encodeStoreAnswer({StoreAnswer::Status::kOk, {"a", ""}, 7}));
  const ViewName view{numbered<Lineage>(1), 3};
  seed("proof", "question", encodeQuestion({numbered<Challenge>(1), view}));
  seed("proof", "claim",
       encodeClaim({{numbered<MemberId>(2), 1, "record"}, numbered<Challenge>(3), view, {}}));
  seed("proof", "proof", encodeProof({}));
}

std::string frame(FrameType type, const std::string& payload, uint64_t tag = 0, uint64_t aux = 0) {
  const FrameBytes header = encodeHeader({type, payload.size(), 1, tag, aux});
  return std::string(header.begin(), header.end()) + payload;
}

// What streams.h makes a CutStream of.
std::string cut(uint8_t flags, const std::string& lengths, const std::string& stream) {
  return static_cast<char>(flags) + (static_cast<char>(lengths.size()) + lengths) + stream;
}

// Whole, in three pieces, and byte by byte; the peer hangs up in some.
void streamSeeds(const std::string& parser, const std::string& name, const std::string& stream) {
  seed(parser, name + "-whole", cut(1, "", stream));
  seed(parser, name + "-pieces", cut(6, std::string("\x07\x29"), stream));
  seed(parser, name + "-bytes", cut(5, std::string(31, '\x01'), stream));
}

Hello helloTo(uint8_t generation, int rank) {  // as listener_streams.cpp expects it
  Hello hello;
  hello.nonce = numbered<Nonce>(generation);
  hello.proof.bytes.fill(static_cast<uint8_t>(generation + 16));
  hello.from = numbered<Incarnation>(3);
  hello.to = numbered<Incarnation>(4);
  hello.rank = rank;
  return hello;
}

Welcome welcomeFrom(uint8_t proof,
                    uint8_t process) {  // (5, 4): as handshake_streams.cpp expects it
  Welcome welcome;
  welcome.proof.bytes.fill(proof);
  welcome.from = numbered<Incarnation>(process);
  return welcome;
}

std::string noticeFrame() {
  Notice notice;
  notice.generation = numbered<Nonce>(1);
  return frame(FrameType::kNotice, encodeNotice(notice));
}

void frames() {
  streamSeeds("liveness_connection", "left",
              frame(FrameType::kBeat, "", 1000) + noticeFrame() + noticeFrame() +
                  frame(FrameType::kGoodbye, "", 0, 1));
  streamSeeds("liveness_connection", "accused",
              noticeFrame() + frame(FrameType::kFailed, "too slow"));
  streamSeeds("liveness_connection", "beats",
              frame(FrameType::kBeat, "pad") + frame(FrameType::kBeat, "", 5));
  streamSeeds("connection", "usual",
              frame(FrameType::kBarrier, "") + frame(FrameType::kData, std::string(50, 'd')) +
                  frame(FrameType::kAnnounce, std::string(8, 's'), 1, 0) +
                  frame(FrameType::kMessage, "", 1, 1) + frame(FrameType::kMessage, "piece", 1, 1) +
                  frame(FrameType::kFailed, encodeFailure({}), 0, 1));
  streamSeeds("connection", "leaves", frame(FrameType::kGoodbye, "", 0, 2) + "rest");
  seed("connection", "closes",
       cut(0x44, "\x64", frame(FrameType::kData, "x") + frame(FrameType::kBeat, "")));
  seed("connection", "long", cut(0x19, "\x64", frame(FrameType::kData, std::string(3000, 'd'))));
}

void answers() {
  const std::string welcome = encodeWelcome(welcomeFrom(5, 4));
  const std::string unknown = encodeRefusal({RefusalCode::kUnknownGeneration, "not yet"});
  const std::string foreign = encodeRefusal({RefusalCode::kWrongVersion, "another"});
  for (const std::string parser : {"inbox", "dial"}) {
    streamSeeds(parser, "welcome", welcome + "beyond");
    streamSeeds(parser, "refusal", unknown);
    streamSeeds(parser, "data", frame(FrameType::kData, "no answer"));
  }
  streamSeeds("inbox", "hello", encodeHello(helloTo(1, 1)) + "beyond");
  streamSeeds("dial", "stranger", encodeWelcome(welcomeFrom(6, 4)));
  streamSeeds("dial", "other", encodeWelcome(welcomeFrom(5, 6)));

  const auto said = [](const std::string& piece) {
    return static_cast<char>(piece.size()) + piece;
  };
  const std::string hang_up(1, '\xff');
  seed("connector", "welcome", said(welcome.substr(0, 9)) + said(welcome.substr(9) + "beyond"));
  seed("connector", "again", said(unknown) + hang_up + said(foreign) + said(welcome));
  seed("connector", "never",
       said(foreign) + said(encodeWelcome(welcomeFrom(6, 4))) +
           said(encodeWelcome(welcomeFrom(5, 6))));
}

// Steps of listener_streams.cpp.
void sieges() {
  const auto says = [](uint8_t caller, const std::string& piece) {
    return static_cast<char>(caller) + (static_cast<char>(piece.size()) + piece);
  };
  const auto hangsUp = [](uint8_t caller) {
    return std::string(1, static_cast<char>(16 + caller));
  };
  const std::string expect_first(1, '\x1a');
  const std::string expect_second(1, '\x1b');
  const std::string forget_first(1, '\x18');
  const std::string first = encodeHello(helloTo(1, 1));
  Hello forgets = helloTo(1, 2);
  forgets.channel = 0x80;
  Hello elsewhere = helloTo(1, 1);
  elsewhere.to = numbered<Incarnation>(9);
  Hello wrong_secret = helloTo(1, 1);
  wrong_secret.proof = {};
  std::string old = first;
  old[4] = 0;
  seed("listener", "pieces",
       expect_first + says(0, first.substr(0, 30)) + says(1, "garbage") +
           says(0, first.substr(30)) + says(0, "beyond") + hangsUp(1));
  seed("listener", "parked",
       says(0, first) + says(1, encodeHello(helloTo(2, 1))) + says(2, first) + hangsUp(2) +
           expect_first + expect_second);
  seed("listener", "forgets",
       says(0, first) + says(1, encodeHello(forgets)) + says(2, first) + expect_first +
           says(2, "impatient") + says(3, first));
  seed("listener", "refused",
       expect_first + says(0, encodeHello(elsewhere)) + says(1, encodeHello(wrong_secret)) +
           says(2, old) + says(3, encodeHello(helloTo(1, 7))) +
           says(4, encodeHello(helloTo(0, 0))) + forget_first + says(5, first + "impatient") +
           hangsUp(3));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: seeds DIRECTORY\n";
    return 2;
  }
  directory = argv[1];
  headers();
  failures();
  notices();
  handshakes();
  reports();
  rosters();
  addresses();
  elasticMessages();
  elasticCalls();
  frames();
  answers();
  sieges();
  return 0;
}
