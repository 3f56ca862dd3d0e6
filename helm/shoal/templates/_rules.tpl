{{- /*
What the operator may do, and why; what it watches it need not get. Nothing is allowed that is not asked for here, and nothing is
asked for that the operator does not do: it never lists Secrets, never writes roles or nodes, of pods
nothing but their resources and one annotation, and never executes in a pod. What it makes is applied server-side, which takes create and patch; what an
object of ours owns, Kubernetes deletes with it.
*/ -}}

{{- define "shoal.clusterRules" -}}
# Nodes: which ones a pool selects, what pods may allocate on them, whether they are Ready.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Enrolment: asks the API server whose token an agent shows, before a certificate is signed.
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
{{- end }}

{{- define "shoal.rules" -}}
# What users write: read only, all of it.
- apiGroups: [shoal.dev]
  resources: [models, devicepools]
  verbs: [list, watch]
# A job that names a Model gets a Partition and a Placement.
- apiGroups: [shoal.dev]
  resources: [partitions, placements]
  verbs: [list, watch, create, patch]
# Jobs are deleted when ttlSecondsAfterFinished has passed.
- apiGroups: [shoal.dev]
  resources: [inferencejobs]
  verbs: [list, watch, delete]
# Devices are what the coordinators report; the operator alone writes them.
- apiGroups: [shoal.dev]
  resources: [devices]
  verbs: [list, watch, create, patch, delete]
# What has become of each object.
- apiGroups: [shoal.dev]
  resources:
    - models/status
    - devicepools/status
    - partitions/status
    - placements/status
    - inferencejobs/status
    - devices/status
  verbs: [patch]
# Workers: inspect, cut, deliver, carry. Those that have served their time are deleted.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create, patch, delete]
# A pool's coordinator; it goes with its pool.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch]
# A pool's agents; with budget.percent there is a set for each size of node, which may vanish.
- apiGroups: [apps]
  resources: [daemonsets]
  verbs: [list, watch, create, patch, delete]
# Why a pod of a pool does not start (image, OOMKilled, no node), and on which node an agent is; and
# an agent's budget, an annotation of its pod, when that of its pool is edited.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, patch]
# An agent's memory limit follows the floor that it has measured and its budget, while it runs.
- apiGroups: [""]
  resources: [pods/resize]
  verbs: [patch]
# The one line that a worker prints at its end, or its last words.
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
# Certificates of pools: POOL-ca, and POOL-coordinator-tls, -worker-tls and -viewer-tls. Their names
# depend on the pools', so they cannot be named here; but what else there is cannot be listed.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
# POOL-trust, and the documents of Partitions.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, patch]
# A coordinator's address, its volume, and the identity of a pool's pods.
- apiGroups: [""]
  resources: [services, persistentvolumeclaims, serviceaccounts]
  verbs: [get, create, patch]
# Events report in kubectl describe what happened; those of a claim say why it is not bound.
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
{{- $others := include "shoal.otherGroups" . | fromJsonArray }}
{{- if .Values.networkPolicies.enabled }}
# Who may connect to a pool's pods.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch]
{{- else }}
# Those of pools that were made while networkPolicies.enabled was true are removed.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, delete]
{{- end }}
{{- if .Values.podMonitor.enabled }}
# A pool's PodMonitor.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, create, patch]
{{- else if has "monitoring.coreos.com" $others }}
# Those of pools that were made while podMonitor.enabled was true are removed.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, delete]
{{- end }}
{{- if .Values.certManager.enabled }}
# A pool's authority and certificates, asked of cert-manager.
- apiGroups: [cert-manager.io]
  resources: [issuers, certificates]
  verbs: [get, create, patch]
{{- else if has "cert-manager.io" $others }}
# Those that were asked for while certManager.enabled was true are removed.
- apiGroups: [cert-manager.io]
  resources: [issuers, certificates]
  verbs: [get, delete]
{{- end }}
{{- end }}

{{- define "shoal.ownRules" -}}
# The Lease that keeps two operators from acting at once. What is to be made has no name yet.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
# This Lease, and no other.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [shoal-operator]
  verbs: [get, update]
# shoal-ca, the authority that signs the certificate of enrolment. It is made once and never changed.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
# This Secret, and no other of the release's namespace, unless pools may be in it.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [shoal-ca]
  verbs: [get]
{{- end }}
