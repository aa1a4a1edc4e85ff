// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the KUnit suites share.

/// Fails the test, a function that returns a [`Result`](kernel::error::Result), if a condition does
/// not hold. A failed `assert!` would end the task on the spot, and leave devices behind.
macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            ::kernel::pr_err!(
                "{}:{}: does not hold: {}\n",
                file!(),
                line!(),
                stringify!($condition)
            );
            return Err(::kernel::error::code::EINVAL);
        }
    };
}
