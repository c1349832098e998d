// Whether what others tell of views and newcomers can be true: the one place that says so. Pure
// functions.
//
// A view is *sealed* with the secret of the view before it, which that one's members alone know: by
// its seal they see that one of them made it, whoever passes it on. So nobody else can put a view
// in the place of the next one. The seal covers a digest of the view's secret, which is told to its
// members alone: so nobody else can give them another one. Views without secrets (the model
// checker's) have no seals.
#pragma once

#include <string>

#include "elastic/view.h"

namespace torchft_ext {

// Sets it, and the digest that stands for it under the seal.
void setSecret(View& view, const ViewSecret& secret);
// Does that secret belong to the view, as its digest says?
bool isSecretOf(const ViewSecret& secret, const View& view);
// By the secret of the view before, of everything but the view's own secret.
ViewSeal sealOf(const View& view, const ViewSecret& secret_before);

// Each returns what speaks against it, for the log. Empty: nothing does.

// Any view, by itself.
std::string objectionTo(const View& view);
// One that is newer than `known`, which this member is in, and of the same lineage. `teller` tells
// of it: who has missed a view cannot check the seals, so it believes a member of its own alone,
// and of those none that `known` took in.
std::string objectionToSuccessor(const View& view, const View& known, const MemberId& teller);
// One that is told, by what is known. `known` null: nothing, so that the view itself is all there
// is to judge by. `needs_secret`: it must come with its secret, if it has one. Says which view it
// is.
std::string objectionToTold(const View& view, const View* known, const MemberId& teller,
                            bool needs_secret);
// A newcomer that asks for a place, on a connection on which it has proved to be `proved`.
std::string objectionToNewcomer(const Member& newcomer, const Member& proved);

}  // namespace torchft_ext
