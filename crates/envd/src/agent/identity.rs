//! Who this sandbox is: environment, tokens and defaults, set by `POST /init`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The body of `POST /init`. A field that is absent or null leaves what was set before.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Init {
    /// Wall clock of the host, RFC 3339.
    pub timestamp: Option<String>,
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Token that clients must send; empty means none is asked for.
    pub access_token: Option<String>,
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    pub sandbox_id: Option<String>,
    pub template_id: Option<String>,
    pub hostname: Option<String>,
    /// Base64 of at least 32 random bytes.
    pub entropy: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Identity {
    /// Token of internal calls; empty until the first `POST /init`.
    pub control_token: String,
    pub access_token: String,
    pub default_user: String,
    pub default_workdir: String,
    pub env_vars: BTreeMap<String, String>,
    pub sandbox_id: String,
    pub template_id: String,
}

impl Identity {
    /// Checks the request as a whole, so that a refused one changes nothing.
    pub fn check(init: &Init) -> Result<(), String> {
        if let Some(vars) = &init.env_vars {
            for (name, value) in vars {
                check_variable(name, value)?;
            }
        }
        for (field, value) in [
            ("sandboxId", &init.sandbox_id),
            ("templateId", &init.template_id),
        ] {
            if value.as_ref().is_some_and(|v| v.contains('\0')) {
                return Err(format!("{field} must not contain a NUL byte"));
            }
        }
        if let Some(dir) = &init.default_workdir {
            if !dir.is_empty() && !dir.starts_with('/') || dir.contains('\0') {
                return Err(format!("defaultWorkdir {dir:?} must be an absolute path"));
            }
        }
        if let Some(name) = &init.hostname {
            let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
            if name.is_empty() || name.len() > 63 || !name.bytes().all(good) {
                return Err(format!(
                    "hostname {name:?} must be 1 to 63 letters, digits, hyphens or dots"
                ));
            }
        }
        Ok(())
    }

    /// Takes over the fields that are set.
    pub fn apply(&mut self, init: &Init) {
        let set = |to: &mut String, from: &Option<String>| {
            if let Some(value) = from {
                to.clone_from(value);
            }
        };
        set(&mut self.access_token, &init.access_token);
        set(&mut self.default_user, &init.default_user);
        set(&mut self.default_workdir, &init.default_workdir);
        set(&mut self.sandbox_id, &init.sandbox_id);
        set(&mut self.template_id, &init.template_id);
        if let Some(vars) = &init.env_vars {
            self.env_vars.clone_from(vars);
        }
    }

    /// The environment every process of the sandbox starts from, without what depends on its user.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let mut env = self.env_vars.clone();
        env.insert("E2B_SANDBOX".into(), "true".into());
        for (name, value) in [
            ("E2B_SANDBOX_ID", &self.sandbox_id),
            ("E2B_TEMPLATE_ID", &self.template_id),
        ] {
            if !value.is_empty() {
                env.insert(name.into(), value.clone());
            }
        }
        env
    }
}

/// Whether a variable can be part of an environment.
pub fn check_variable(name: &str, value: &str) -> Result<(), String> {
    if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
        return Err(format!(
            "environment variable {name:?}: a name must not be empty or contain '=', and no part may contain a NUL byte"
        ));
    }
    Ok(())
}
