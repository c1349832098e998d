// Writes valid input for every parser of parsers_fuzz.cpp: DIRECTORY/<parser>/<name>, for
// directories that exist. The same on every run.
#include <cstdint>
#include <fstream>
#include <iostream>
#include <string>

#include "net/failure_frame.h"
#include "net/frame.h"
#include "net/handshake.h"
#include "net/socket_address.h"
#include "peers/notice.h"
#include "rendezvous/records.h"

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
    failure.epoch = 5;
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
  for (const auto type : {Notice::Type::kFailed, Notice::Type::kLeft, Notice::Type::kAsk}) {
    Notice notice;
    notice.type = type;
    notice.epoch = numbered<Nonce>(1);
    if (type == Notice::Type::kFailed) {
      notice.failure.kind = FailureKind::kPeerLost;
      notice.failure.cause = {3, -1, "host-b", 812, "its process ended"};
      notice.dead = numbered<Incarnation>(2);
    } else if (type == Notice::Type::kLeft) {
      notice.rank = 3;
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
  hello.lane = 1;
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
  record.addresses = {*SocketAddress::parse("10.0.0.1:7000")};
  record.line_addresses = {*SocketAddress::parse("[fe80::1%1]:7001"),
                           *SocketAddress::parse("[::1]:7002")};
  return record;
}

void rosters() {
  seed("record", "usual", encodeRecord(member(1)));
  seed("record", "empty", encodeRecord({}));
  Withdrawal withdrawal;
  withdrawal.member = member(2);
  withdrawal.ending.failure.kind = FailureKind::kAborted;
  withdrawal.ending.failure.cause = {1, -1, "host-b", 812, "abort() was called"};
  withdrawal.ending.origin = numbered<Token>(3);
  seed("withdrawal", "aborted", encodeWithdrawal(withdrawal));
  Roster roster;
  for (uint8_t size : {0, 1, 2, 4}) {
    while (roster.members.size() < size) roster.members.push_back(member(size));
    seed("go", std::to_string(size), encodeGo(numbered<Token>(9), roster));
  }
}

void addresses() {
  int number = 0;
  for (const char* text : {"127.0.0.1:80", "[::1]:65535", "[fe80::1%1]:7001", "0.0.0.0:0",
                           "7000-7100", "7000", "host:1"}) {
    seed("address", std::to_string(++number), text);
  }
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
  rosters();
  addresses();
  return 0;
}
